// SPDX-License-Identifier: Apache-2.0
//
// Fills a Tree from outside: from a layer's tar archive or from a directory. File content goes to a
// ContentSink as it comes by, and only its place is kept.
#ifndef LAMINA_EROFS_IMPORT_H_
#define LAMINA_EROFS_IMPORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "erofs/tree.h"

namespace lamina::erofs {

// Takes file content and says where it put it. Calls come from one thread, one file at a time:
// BeginFile, then Append and AppendHole in file order until `size` bytes are accounted for, then
// EndFile. After an error the sink is not used again.
class ContentSink {
 public:
  virtual ~ContentSink() = default;
  virtual absl::Status BeginFile(uint64_t size) = 0;
  virtual absl::Status Append(std::span<const std::byte> data) = 0;
  // `length` zero bytes that need not be stored. Starts at a multiple of 4 KiB, and is one in length
  // unless it ends the file.
  virtual absl::Status AppendHole(uint64_t length) = 0;
  virtual absl::StatusOr<std::vector<Extent>> EndFile() = 0;
};

// Holes are kept in units of this many bytes for a file of `size` bytes, smaller ones are stored as
// zeros: it bounds the chunk index that EROFS needs for a sparse file. A power of two, from 4 KiB up
// to 1 MiB.
uint64_t HoleUnit(uint64_t size);

// Gives the next bytes of a tar archive: fills a part of `into` and returns how many, 0 at the end.
using TarReadFunction = std::function<absl::StatusOr<size_t>(std::span<std::byte> into)>;

// Reads an uncompressed tar archive as an OCI layer (image-spec, layer.md): ".wh.NAME" becomes an
// overlayfs whiteout (character device 0:0), ".wh..wh..opq" marks its directory opaque
// (trusted.overlay.opaque=y). Entries act as GNU tar would extract them: a later entry replaces an
// earlier one of the same path, missing parents are made (mode 0755, owner 0:0). Nothing leaves the
// root: ".." and absolute names are confined, and a hard link to what is not there is an error that
// names the entry. The archive is read to its end.
absl::StatusOr<Tree> ImportTar(const TarReadFunction& read, ContentSink& sink);

// Reads a directory of the local file system, without following symbolic links out of it and without
// crossing into other mounts.  Holes are found with SEEK_DATA/SEEK_HOLE. Names are visited in byte
// order, so that equal trees give equal results.
absl::StatusOr<Tree> ImportDirectory(const std::string& path, ContentSink& sink);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_IMPORT_H_
