// SPDX-License-Identifier: Apache-2.0
//
// Where the members of a tar archive lie, so that an image inside an archive can be read in place.
// This is for the archive around an image (docker-archive, oci-archive); layers are read by erofs/.
#ifndef LAMINA_FS_IMAGE_TAR_INDEX_H_
#define LAMINA_FS_IMAGE_TAR_INDEX_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "erofs/tar_header.h"
#include "erofs/tar_pax.h"
#include "fs/image/byte_range.h"

namespace lamina::fs {

// Immutable once built; any number of threads.
class TarIndex {
 public:
  // Opens an archive, compressed with gzip or zstd or not. One that is compressed is first
  // decompressed to a nameless file in $TMPDIR (or /var/tmp): members of a compressed archive
  // cannot be reached by offset. What follows the end of the archive is not decompressed;
  // kResourceExhausted if more than 256 MiB and 64 times the archive's size come out of it.
  static absl::StatusOr<TarIndex> Open(const std::string& path);
  // Reads the headers of an uncompressed archive: ustar, GNU long names, pax records.
  static absl::StatusOr<TarIndex> Build(ByteRange archive);

  // The content of a member, found through symbolic and hard links between members (older `docker
  // save` links equal layers). Names are compared after removing "./". kNotFound if it is missing
  // or a link leads nowhere.
  absl::StatusOr<ByteRange> Find(std::string_view name) const;

 private:
  // Whether the archive has at least `end` bytes; then they can be read.
  using Reach = std::function<absl::StatusOr<bool>(uint64_t end)>;
  absl::Status AddMembers(const Reach& reach);
  // `described` is what extended headers say of it; its content is at `position`.
  absl::Status AddMember(const erofs::TarHeader& header, const erofs::PaxFields& described,
                         uint64_t position, uint64_t size);

  struct Member {
    uint64_t offset = 0;
    uint64_t size = 0;
    std::string target;  // of a link, as a normal member name
    bool is_link = false;
  };

  ByteRange archive_;
  std::map<std::string, Member, std::less<>> members_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_TAR_INDEX_H_
