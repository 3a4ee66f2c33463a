// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace lamina {

void UniqueFd::Reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

Mapping::~Mapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

absl::StatusOr<Mapping> Mapping::OfFile(int fd, uint64_t size, bool writable) {
  if (size == 0) return Mapping();
  ASSIGN_OR_RETURN(const uint64_t file_size, FileSize(fd));
  if (file_size < size) {
    return absl::DataLossError(fmt::format("file has {} bytes, needs {}", file_size, size));
  }
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  void* address = ::mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return ErrnoStatus(errno, fmt::format("map {} bytes", size));
  return Mapping({static_cast<std::byte*>(address), size});
}

absl::StatusOr<Mapping> Mapping::Anonymous(uint64_t size) {
  if (size == 0) return Mapping();
  void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return ErrnoStatus(errno, fmt::format("allocate {} bytes", size));
  return Mapping({static_cast<std::byte*>(address), size});
}

absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags, uint32_t mode) {
  UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC, mode));
  if (!fd.valid()) return ErrnoStatus(errno, "open " + path);
  return fd;
}

absl::StatusOr<uint64_t> FileSize(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return ErrnoStatus(errno, "fstat");
  return static_cast<uint64_t>(info.st_size);
}

absl::Status ReadFull(int fd, uint64_t offset, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t got = ::pread(fd, into.data(), into.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return ErrnoStatus(errno, fmt::format("read {} bytes at {}", into.size(), offset));
    }
    if (got == 0) {
      return absl::DataLossError(
          fmt::format("end of file at {}, {} bytes missing", offset, into.size()));
    }
    offset += static_cast<uint64_t>(got);
    into = into.subspan(static_cast<size_t>(got));
  }
  return absl::OkStatus();
}

absl::Status WriteFull(int fd, uint64_t offset, std::span<const std::byte> from) {
  while (!from.empty()) {
    const ssize_t put = ::pwrite(fd, from.data(), from.size(), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      return ErrnoStatus(errno, fmt::format("write {} bytes at {}", from.size(), offset));
    }
    offset += static_cast<uint64_t>(put);
    from = from.subspan(static_cast<size_t>(put));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFileToString(const std::string& path, uint64_t limit) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get()), "{}", path);
  if (size > limit) {
    return absl::ResourceExhaustedError(
        fmt::format("{}: {} bytes, more than the {} allowed", path, size, limit));
  }
  std::string content(size, '\0');
  RETURN_IF_ERROR(ReadFull(fd.get(), 0, std::as_writable_bytes(std::span(content))), "{}", path);
  return content;
}

absl::Status WriteFileAtomically(const std::string& path, std::string_view content, uint32_t mode,
                                 Durability durability) {
  std::string temporary = path + ".XXXXXX";
  UniqueFd fd(::mkostemp(temporary.data(), O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "create " + temporary);
  absl::Status status = WriteFull(fd.get(), 0, AsBytes(content));
  if (status.ok() && ::fchmod(fd.get(), mode) != 0) status = ErrnoStatus(errno, "fchmod");
  if (status.ok() && durability == Durability::kSynced && ::fsync(fd.get()) != 0) {
    status = ErrnoStatus(errno, "fsync");
  }
  if (status.ok() && ::rename(temporary.c_str(), path.c_str()) != 0) {
    status = ErrnoStatus(errno, "rename into place");
  }
  if (!status.ok()) ::unlink(temporary.c_str());
  return Annotate(std::move(status), "write " + path);
}

void DropResident(std::span<const std::byte> mapped) {
  // Advice: there is nothing to do about a failure, and nothing wrong with one.
  if (!mapped.empty())
    ::madvise(const_cast<std::byte*>(mapped.data()), mapped.size(), MADV_DONTNEED);
}

absl::StatusOr<TemporaryDirectory> TemporaryDirectory::Create(const std::string& parent,
                                                              std::string_view prefix) {
  std::string path = fmt::format("{}/{}XXXXXX", parent, prefix);
  if (::mkdtemp(path.data()) == nullptr) return ErrnoStatus(errno, "create directory " + path);
  return TemporaryDirectory(std::move(path));
}

TemporaryDirectory& TemporaryDirectory::operator=(TemporaryDirectory&& other) noexcept {
  std::swap(path_, other.path_);
  return *this;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;  // nothing can be done about it in a destructor
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<bool> TryLock(int fd) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno == EWOULDBLOCK) return false;
  return ErrnoStatus(errno, "flock");
}

void RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace lamina
