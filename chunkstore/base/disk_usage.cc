// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/disk_usage.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <utility>
#include <vector>

#include "chunkstore/base/directory_names.h"
#include "chunkstore/base/file.h"

namespace lamina {
namespace {

constexpr int kOpenDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

// Goes through a tree with one directory open at a time, by names and not by paths: those may be longer
// than the kernel takes, and directories deeper than there are descriptors.
class Walk {
 public:
  explicit Walk(const std::string& root) : root_path_(root) {}

  absl::StatusOr<DiskUsage> Run() {
    ASSIGN_OR_RETURN(current_, OpenFile(root_path_, kOpenDirectory));
    struct stat info {};
    if (::fstat(current_.get(), &info) != 0) return ErrnoStatus(errno, "stat");
    device_ = info.st_dev;
    Count(info);
    levels_.push_back({.inode = info.st_ino});
    RETURN_IF_ERROR(ReadCurrent());
    while (!levels_.empty()) {
      if (levels_.back().left.empty()) {
        levels_.pop_back();
        if (!levels_.empty()) RETURN_IF_ERROR(GoUp());
        continue;
      }
      const std::string name = std::move(levels_.back().left.back());
      levels_.back().left.pop_back();
      RETURN_IF_ERROR(GoDown(name));
    }
    return usage_;
  }

 private:
  struct Level {
    std::string name;
    ino_t inode = 0;
    std::vector<std::string> left;  // directories in it
  };

  void Count(const struct stat& info) {
    constexpr int64_t kBlock = 512;  // of st_blocks (stat(2))
    if (!S_ISDIR(info.st_mode) && info.st_nlink > 1 && !linked_.insert(info.st_ino).second) return;
    usage_.bytes += info.st_blocks * kBlock;
    ++usage_.inodes;
  }

  // Counts what is in the directory that levels_ ends with.
  absl::Status ReadCurrent() {
    absl::StatusOr<std::vector<std::string>> names = DirectoryNames(current_.get());
    if (absl::IsNotFound(names.status())) return absl::OkStatus();
    RETURN_IF_ERROR(names.status());
    for (std::string& name : *names) {
      struct stat info {};
      if (::fstatat(current_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;
        return ErrnoStatus(errno, fmt::format("stat {}", name));
      }
      // Files of some file systems, like overlayfs, are of other devices than their directories.
      if (S_ISDIR(info.st_mode) && info.st_dev != device_) continue;
      Count(info);
      if (S_ISDIR(info.st_mode)) levels_.back().left.push_back(std::move(name));
    }
    return absl::OkStatus();
  }

  absl::Status GoDown(const std::string& name) {
    UniqueFd child(::openat(current_.get(), name.c_str(), kOpenDirectory));
    // Gone, or something else by now.
    if (!child.valid() && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP)) {
      return absl::OkStatus();
    }
    struct stat info {};
    if (!child.valid() || ::fstat(child.get(), &info) != 0) {
      return ErrnoStatus(errno, "open " + name);
    }
    if (info.st_dev != device_) return absl::OkStatus();
    current_ = std::move(child);
    levels_.push_back({.name = name, .inode = info.st_ino});
    return ReadCurrent();
  }

  bool IsAt(int fd, ino_t inode) const {
    struct stat info {};
    return fd >= 0 && ::fstat(fd, &info) == 0 && info.st_dev == device_ && info.st_ino == inode;
  }

  // To the directory that levels_ ends with. If the one below it has been moved elsewhere, ".." is not
  // it, and the way leads from the root; what is no longer on that does not count any further.
  absl::Status GoUp() {
    current_.Reset(::openat(current_.get(), "..", kOpenDirectory));
    if (IsAt(current_.get(), levels_.back().inode)) return absl::OkStatus();
    ASSIGN_OR_RETURN(current_, OpenFile(root_path_, kOpenDirectory));
    for (size_t level = 1; level < levels_.size(); ++level) {
      UniqueFd child(::openat(current_.get(), levels_[level].name.c_str(), kOpenDirectory));
      if (!IsAt(child.get(), levels_[level].inode)) {
        levels_.resize(level);
        break;
      }
      current_ = std::move(child);
    }
    return absl::OkStatus();
  }

  const std::string& root_path_;
  dev_t device_ = 0;
  UniqueFd current_;
  std::vector<Level> levels_;  // from the root to the current one
  std::set<ino_t> linked_;
  DiskUsage usage_;
};

}  // namespace

absl::StatusOr<DiskUsage> DiskUsageOf(const std::string& directory) {
  absl::StatusOr<DiskUsage> usage = Walk(directory).Run();
  RETURN_IF_ERROR(usage.status(), "usage of {}", directory);
  return usage;
}

}  // namespace lamina
