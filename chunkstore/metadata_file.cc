// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/metadata_file.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/format.h"

namespace lamina::chunkstore {
namespace {

absl::Status Truncate(int fd, uint64_t size) {
  if (::ftruncate(fd, static_cast<off_t>(size)) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, fmt::format("set a file to {} bytes", size));
}

}  // namespace

MetadataFile::MetadataFile(int fd, const Section& section)
    : fd_(fd),
      section_(section),
      begin_(section.compressed ? PaddedFileSize(section.uncompressed_length) : 0) {}

absl::Status MetadataFile::Append(std::span<const std::byte> stored) {
  if (stored_ == 0) RETURN_IF_ERROR(Truncate(fd_, 0));
  RETURN_IF_ERROR(WriteFull(fd_, begin_ + stored_, stored), "write metadata");
  stored_ += stored.size();
  return absl::OkStatus();
}

absl::Status MetadataFile::Finish() {
  RETURN_IF_ERROR(Truncate(fd_, begin_ + stored_));
  ASSIGN_OR_RETURN(const Mapping file, Mapping::OfFile(fd_, begin_ + stored_, /*writable=*/false));
  uint64_t position = 0;
  RETURN_IF_ERROR(DecodeSectionTo(
      section_, "metadata", file.bytes().subspan(begin_), [&](std::span<const std::byte> piece) {
        const uint64_t at = std::exchange(position, position + piece.size());
        if (begin_ == 0) return absl::OkStatus();  // it is there
        return WriteFull(fd_, at, piece);
      }));
  return Truncate(fd_, section_.uncompressed_length);
}

}  // namespace lamina::chunkstore
