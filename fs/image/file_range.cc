// SPDX-License-Identifier: Apache-2.0
#include "fs/image/file_range.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

namespace lamina::fs {

absl::StatusOr<FileRange> FileRange::Open(const std::string& path) {
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_NONBLOCK));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "fstat " + path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(fmt::format("{}: not a regular file", path));
  }
  return FileRange{std::make_shared<const UniqueFd>(std::move(fd)), 0,
                   static_cast<uint64_t>(info.st_size)};
}

absl::Status FileRange::Read(uint64_t position, std::span<std::byte> into) const {
  if (position > size || into.size() > size - position) {
    return absl::DataLossError(fmt::format("{} bytes at {} are outside the {} that are there",
                                           into.size(), position, size));
  }
  return ReadFull(file->get(), offset + position, into);
}

absl::StatusOr<std::string> FileRange::ReadAll(uint64_t limit) const {
  if (size > limit) {
    return absl::ResourceExhaustedError(
        fmt::format("{} bytes, more than the {} allowed", size, limit));
  }
  std::string content(size, '\0');
  RETURN_IF_ERROR(Read(0, std::as_writable_bytes(std::span(content))));
  return content;
}

}  // namespace lamina::fs
