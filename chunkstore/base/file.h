// SPDX-License-Identifier: Apache-2.0
//
// Descriptors, mappings and whole-file operations. Everything here is thread-compatible: distinct
// objects may be used from distinct threads, one object needs outside locking unless said
// otherwise.
#ifndef LAMINA_CHUNKSTORE_BASE_FILE_H_
#define LAMINA_CHUNKSTORE_BASE_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina {

// Owns a file descriptor and closes it.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) Reset(other.Release());
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  // Gives the descriptor to the caller, who must close it.
  int Release() { return std::exchange(fd_, -1); }
  void Reset(int fd = -1);

 private:
  int fd_ = -1;
};

// Owns a memory mapping and unmaps it.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::span<std::byte> bytes() { return bytes_; }
  std::span<const std::byte> bytes() const { return bytes_; }

  // Maps the first `size` bytes of `fd`, shared. The file must be at least that long for as long as
  // the mapping lives: touching pages past its end raises SIGBUS. Size 0 gives an empty mapping.
  static absl::StatusOr<Mapping> OfFile(int fd, uint64_t size, bool writable);
  // Zeroed private memory, page aligned.
  static absl::StatusOr<Mapping> Anonymous(uint64_t size);

 private:
  explicit Mapping(std::span<std::byte> bytes) : bytes_(bytes) {}
  std::span<std::byte> bytes_;
};

// open(2) with O_CLOEXEC added. Errors name the path.
absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags, uint32_t mode = 0644);

absl::StatusOr<uint64_t> FileSize(int fd);

// Reads or writes all of it at `offset`, or fails; an early end of file is kDataLoss.
absl::Status ReadFull(int fd, uint64_t offset, std::span<std::byte> into);
absl::Status WriteFull(int fd, uint64_t offset, std::span<const std::byte> from);

// The whole file; fails with kResourceExhausted if it is larger than `limit` bytes.
absl::StatusOr<std::string> ReadFileToString(const std::string& path, uint64_t limit);

enum class Durability {
  kSynced,  // on the disk before it gets its name
  kCached,  // may be lost or torn by a machine crash: for what carries a checksum
};

// Writes `content` to a temporary name beside `path` and renames it into place: readers see the old
// file or the new one, never a part.
absl::Status WriteFileAtomically(const std::string& path, std::string_view content,
                                 uint32_t mode = 0644, Durability durability = Durability::kSynced);

// Lets the kernel take back the memory of a shared file mapping, or of a page-aligned part of one; it
// is read again when it is touched.
void DropResident(std::span<const std::byte> mapped);

// A directory of its own below `parent`, removed with everything in it when the object goes unless
// Keep() was called. Used to build a thing whole before it is renamed into place.
class TemporaryDirectory {
 public:
  static absl::StatusOr<TemporaryDirectory> Create(const std::string& parent,
                                                   std::string_view prefix);
  TemporaryDirectory(TemporaryDirectory&& other) noexcept
      : path_(std::exchange(other.path_, std::string())) {}
  TemporaryDirectory& operator=(TemporaryDirectory&& other) noexcept;
  ~TemporaryDirectory();

  const std::string& path() const { return path_; }
  // The caller takes over the directory.
  std::string Keep() { return std::exchange(path_, std::string()); }

 private:
  explicit TemporaryDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// Takes the exclusive flock(2) of an open file or directory without waiting: false if somebody else
// has it. It lasts as long as the descriptor, however the process ends.
absl::StatusOr<bool> TryLock(int fd);

// Lets the process have as many descriptors as the hard limit says. The soft one is low for the sake
// of select(2); children have the raised one as well.
void RaiseDescriptorLimit();

// Bytes of a string or trivially copyable object, for the calls above.
inline std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string_view AsText(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_FILE_H_
