// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/oci_layout_origin.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/uring.h"

namespace lamina::chunkstore {
namespace {

// How an origin's objects are read; shared by the origin and its open objects.
class Reader {
 public:
  // Without rings: pread.
  explicit Reader(std::unique_ptr<RingPool> rings) : rings_(std::move(rings)) {}

  absl::Status Read(int fd, std::span<const RangeRead> ranges) {
    if (rings_ != nullptr) {
      absl::Status status = rings_->Read(fd, ranges);
      if (!absl::IsResourceExhausted(status)) return status;
      if (!warned_.exchange(true)) {
        spdlog::warn("reads go through pread(2) when there is no io_uring left: {}",
                     std::string(status.message()));
      }
    }
    for (const RangeRead& range : ranges) RETURN_IF_ERROR(ReadFull(fd, range.offset, range.into));
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<RingPool> rings_;
  std::atomic<bool> warned_{false};
};

class LayoutObject : public OriginObject {
 public:
  LayoutObject(std::string path, UniqueFd fd, uint64_t size, std::shared_ptr<Reader> reader)
      : path_(std::move(path)), fd_(std::move(fd)), size_(size), reader_(std::move(reader)) {}

  absl::Status Read(std::span<const RangeRead> ranges) override {
    for (const RangeRead& range : ranges) {
      if (range.offset > size_ || range.into.size() > size_ - range.offset) {
        return absl::DataLossError(fmt::format("{}: {} bytes at {} are past the end at {}", path_,
                                               range.into.size(), range.offset, size_));
      }
    }
    return Annotate(reader_->Read(fd_.get(), ranges), path_);
  }

 private:
  const std::string path_;
  const UniqueFd fd_;
  const uint64_t size_;
  const std::shared_ptr<Reader> reader_;
};

class LayoutOrigin : public Origin {
 public:
  LayoutOrigin(std::string directory, std::shared_ptr<Reader> reader)
      : directory_(std::move(directory)), reader_(std::move(reader)) {}

  std::string name() const override { return "oci:" + directory_; }

  absl::StatusOr<std::unique_ptr<OriginObject>> Open(const Digest& digest, uint64_t size) override {
    std::string path = fmt::format("{}/blobs/sha256/{}", directory_, digest.Hex());
    // O_NONBLOCK, because a FIFO in the object's place would block the open for ever.
    ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_NONBLOCK | O_NOCTTY));
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "stat " + path);
    if (!S_ISREG(info.st_mode)) {
      return absl::InvalidArgumentError(path + " is not a regular file");
    }
    // Left on, it would make io_uring fail with EAGAIN where the file system cannot promise not to
    // block (NFS).
    if (::fcntl(fd.get(), F_SETFL, 0) != 0) return ErrnoStatus(errno, "fcntl " + path);
    if (static_cast<uint64_t>(info.st_size) != size) {
      return absl::DataLossError(
          fmt::format("{} has {} bytes instead of {}", path, info.st_size, size));
    }
    return std::make_unique<LayoutObject>(std::move(path), std::move(fd), size, reader_);
  }

 private:
  const std::string directory_;
  const std::shared_ptr<Reader> reader_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Origin>> OpenOciLayoutOrigin(const std::string& directory,
                                                            ReadMethod method) {
  // Absolute, so that a later change of the working directory does not matter.
  std::error_code error;
  const std::string path = std::filesystem::absolute(directory, error).lexically_normal();
  if (error) return ErrnoStatus(error.value(), "find image layout " + directory);
  ASSIGN_OR_RETURN(const UniqueFd exists, OpenFile(path, O_RDONLY | O_DIRECTORY), "image layout");

  std::unique_ptr<RingPool> rings;
  if (method != ReadMethod::kPread) {
    absl::StatusOr<std::unique_ptr<RingPool>> created = RingPool::Create();
    if (created.ok()) {
      rings = std::move(*created);
    } else if (method == ReadMethod::kIoUring) {
      return Annotate(std::move(created).status(), "image layout " + path);
    } else {
      spdlog::warn("image layout {} is read with pread(2): {}", path,
                   std::string(created.status().message()));
    }
  }
  return std::make_unique<LayoutOrigin>(path, std::make_shared<Reader>(std::move(rings)));
}

}  // namespace lamina::chunkstore
