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
// EndFile. There are no calls for an empty file. After an error the sink is not used again.
class ContentSink {
 public:
  virtual ~ContentSink() = default;
  virtual absl::Status BeginFile(uint64_t size) = 0;
  virtual absl::Status Append(std::span<const std::byte> data) = 0;
  // `length` zero bytes that need not be stored. Starts at a multiple of HoleUnit(size), and is one
  // in length unless it ends the file.
  virtual absl::Status AppendHole(uint64_t length) = 0;
  virtual absl::StatusOr<std::vector<Extent>> EndFile() = 0;
};

// Holes are kept in units of this many bytes for a file of `size` bytes, smaller ones are stored as
// zeros: it bounds the chunk index that EROFS needs for a sparse file. A power of two, from 4 KiB
// up to 1 MiB; a file of up to 64 GiB has at most 65536 units.
uint64_t HoleUnit(uint64_t size);

// Gives the next bytes of a tar archive: fills a part of `into` and returns how many, 0 at the end.
using TarReadFunction = std::function<absl::StatusOr<size_t>(std::span<std::byte> into)>;

// Reads an uncompressed tar archive (v7, ustar, pax or GNU format) as an OCI layer. Entries act as
// `tar --numeric-owner --xattrs --xattrs-include='*' --acls -xp` would extract them, with these
// points settled:
//
//  - Paths are bytes. "." and ".." are resolved in the text and never lead above the root. A parent
//    that is a symbolic link of this archive is followed inside the root; one that is another kind
//    of file is an error; a missing one is made (mode 0755, owner 0:0, time 0) and marked with
//    kImpliedXattr (merge.h), as is the root of an archive without an entry for ".".
//  - A whiteout below a name that this layer gives to a file or symbolic link has no effect.
//  - A later entry of the same path replaces an earlier one and all below it; a directory again
//    only changes its attributes, and keeps xattrs that the later entry does not mention.
//  - A hard link must lead to something that came before, other than a directory; it keeps the
//    attributes of that.
//  - Whiteouts (image-spec, layer.md): ".wh.NAME" becomes an overlayfs whiteout, a character device
//    0:0 of mode 0; ".wh..wh..opq" marks its directory opaque (trusted.overlay.opaque=y). Both hide
//    lower layers only, wherever they stand in the archive: a file of the same name stays, and a
//    directory of the same name becomes opaque. Other ".wh..wh.*" names are ignored. A character
//    device 0:0 in the archive is taken as the whiteout that it will be.
//  - xattrs: those of Linux are kept but for trusted.overlay.* and user.overlay.*; ACLs become
//    system.posix_acl_* and the mode follows them (import_xattrs.h). ACLs whose users or groups are
//    names without a number are errors.
//
// What is malformed, out of the range of Linux, or more than 1 GiB of names and attributes is an
// error that names the entry or the position. Memory is bounded, content only passes through. The
// archive is read to its end, with what may follow it.
absl::StatusOr<Tree> ImportTar(const TarReadFunction& read, ContentSink& sink);

// Reads a directory of the local file system, without following symbolic links out of it and
// without crossing into other mounts, whose mount points become empty. Holes are found with
// SEEK_DATA/SEEK_HOLE. Names are visited in byte order, so that equal trees give equal results. The
// xattrs kept are those of ImportTar; no name is a whiteout here. A file that changes while it is
// read, or a directory that is moved, is kAborted. Needs /proc.
absl::StatusOr<Tree> ImportDirectory(const std::string& path, ContentSink& sink);

// How to read the upper directory of an overlayfs.
struct UpperOptions {
  // The overlayfs keeps its marks in user.overlay.* (mounted with "userxattr"), not in
  // trusted.overlay.*.
  bool user_xattrs = false;
  // Stops whoever writes to the overlayfs; null if nobody does. What is read afterwards is the layer.
  // The caller lets them go on when the import has returned.
  std::function<absl::Status()> pause;
};

// Reads the upper directory of an overlayfs, mounted or not, as a layer: as ImportDirectory, but for
// what overlayfs put there to say what is hidden below. Whiteouts of either form become character
// devices 0:0 of mode 0, as ImportTar makes them, and opaque directories have kOpaqueXattr. Marks that
// refer to files outside of the directory, of which "metacopy" and "redirect" are two, are
// kFailedPrecondition, naming the file and the mark; those for overlayfs' own use are dropped.
//
// With `pause` nearly all content is read before anybody is stopped, where the file system tells
// reliably that a file has changed (ext4, XFS, Btrfs): while they stand still all names and
// attributes are read, but only the content of files that changed since. What was read of those before
// stays in the sink, and no file refers to it.
absl::StatusOr<Tree> ImportUpper(const std::string& path, ContentSink& sink,
                                 const UpperOptions& options);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_IMPORT_H_
