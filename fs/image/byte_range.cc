// SPDX-License-Identifier: Apache-2.0
#include "fs/image/byte_range.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

namespace lamina::fs {
namespace {

class FileSource : public ByteSource {
 public:
  explicit FileSource(UniqueFd file) : file_(std::move(file)) {}
  absl::Status Read(uint64_t offset, std::span<std::byte> into) const override {
    return ReadFull(file_.get(), offset, into);
  }

 private:
  const UniqueFd file_;
};

}  // namespace

absl::StatusOr<ByteRange> ByteRange::Open(const std::string& path) {
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_NONBLOCK));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "fstat " + path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(fmt::format("{}: not a regular file", path));
  }
  return OfFile(std::move(fd), static_cast<uint64_t>(info.st_size));
}

ByteRange ByteRange::OfFile(UniqueFd file, uint64_t size) {
  return {std::make_shared<const FileSource>(std::move(file)), 0, size};
}

absl::Status ByteRange::Read(uint64_t position, std::span<std::byte> into) const {
  if (position > size || into.size() > size - position) {
    return absl::DataLossError(fmt::format("{} bytes at {} are outside the {} that are there",
                                           into.size(), position, size));
  }
  return source->Read(offset + position, into);
}

absl::StatusOr<std::string> ByteRange::ReadAll(uint64_t limit) const {
  if (size > limit) {
    return absl::ResourceExhaustedError(
        fmt::format("{} bytes, more than the {} allowed", size, limit));
  }
  std::string content(size, '\0');
  RETURN_IF_ERROR(Read(0, std::as_writable_bytes(std::span(content))));
  return content;
}

}  // namespace lamina::fs
