// SPDX-License-Identifier: Apache-2.0
#include "tests/compare/compare_trees.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "chunkstore/base/file.h"
#include "tests/compare/file_view.h"

namespace lamina::compare {
namespace {

constexpr std::pair<std::string_view, Property> kPropertyNames[] = {
    {"mode", Property::kMode},
    {"owner", Property::kOwner},
    {"mtime", Property::kMtime},
    {"directory-mtime", Property::kDirectoryMtime},
    {"hard-links", Property::kHardLinks},
    {"xattrs", Property::kXattrs},
    {"content", Property::kContent},
    {"holes", Property::kHoles},
    {"readdir", Property::kReaddir},
};

std::string_view TypeName(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFREG:
      return "regular file";
    case S_IFDIR:
      return "directory";
    case S_IFLNK:
      return "symbolic link";
    case S_IFCHR:
      return "character device";
    case S_IFBLK:
      return "block device";
    case S_IFIFO:
      return "FIFO";
    case S_IFSOCK:
      return "socket";
    default:
      return "unknown type";
  }
}

std::string Time(const timespec& time) {
  return fmt::format("{}.{:09}", time.tv_sec, time.tv_nsec);
}

// A name in an open directory.
struct Place {
  int directory;
  std::string name;
};

class Comparer {
 public:
  explicit Comparer(const CompareOptions& options) : options_(options) {}

  absl::Status Compare(const std::string& left, const std::string& right) {
    return CompareEntry({AT_FDCWD, left}, {AT_FDCWD, right}, "");
  }
  Comparison Take() { return std::move(result_); }

 private:
  bool Compares(Property property) const { return !options_.ignored.contains(property); }
  bool Full() const { return result_.differences.size() >= options_.max_differences; }

  void Report(const std::string& path, std::string_view what) {
    if (!Full()) {
      result_.differences.push_back(
          fmt::format("{}: {}", path.empty() ? "/" : Printable(path), what));
    }
  }
  template <typename T>
  void CompareValue(const std::string& path, std::string_view what, const T& left, const T& right) {
    if (left != right) Report(path, fmt::format("{} is {} left, {} right", what, left, right));
  }

  absl::Status CompareEntry(const Place& left, const Place& right, const std::string& path);
  void CompareStat(const struct stat& left, const struct stat& right, const std::string& path);
  absl::Status CompareXattrs(const Place& left, const Place& right, const std::string& path);
  absl::Status CompareDirectories(const Place& left, const Place& right, const std::string& path);
  absl::Status CheckListing(int directory, const std::vector<ListedName>& names,
                            std::string_view side, const std::string& path);
  absl::Status CompareContent(const Place& left, const Place& right, uint64_t size,
                              const std::string& path);
  // True if the inode was met before on both sides under the same first name.
  bool CompareLinkGroup(const struct stat& left, const struct stat& right, const std::string& path);

  const CompareOptions& options_;
  Comparison result_;
  // First path of each inode with several names.
  std::map<std::pair<dev_t, ino_t>, std::string> first_left_;
  std::map<std::pair<dev_t, ino_t>, std::string> first_right_;
};

absl::Status Comparer::CompareEntry(const Place& left, const Place& right,
                                    const std::string& path) {
  struct stat left_stat;
  struct stat right_stat;
  if (fstatat(left.directory, left.name.c_str(), &left_stat, AT_SYMLINK_NOFOLLOW) != 0) {
    return ErrnoStatus(errno, fmt::format("left {}: stat", Printable(path)));
  }
  if (fstatat(right.directory, right.name.c_str(), &right_stat, AT_SYMLINK_NOFOLLOW) != 0) {
    return ErrnoStatus(errno, fmt::format("right {}: stat", Printable(path)));
  }
  ++result_.entries;
  if ((left_stat.st_mode & S_IFMT) != (right_stat.st_mode & S_IFMT)) {
    CompareValue(path, "type", TypeName(left_stat.st_mode), TypeName(right_stat.st_mode));
    return absl::OkStatus();
  }
  CompareStat(left_stat, right_stat, path);
  if (Compares(Property::kXattrs)) RETURN_IF_ERROR(CompareXattrs(left, right, path));
  if (S_ISDIR(left_stat.st_mode)) return CompareDirectories(left, right, path);
  const bool seen = CompareLinkGroup(left_stat, right_stat, path);
  if (S_ISLNK(left_stat.st_mode)) {
    ASSIGN_OR_RETURN(const std::string left_target, ReadLink(left.directory, left.name));
    ASSIGN_OR_RETURN(const std::string right_target, ReadLink(right.directory, right.name));
    CompareValue(path, "target", Printable(left_target), Printable(right_target));
  }
  if (!seen && S_ISREG(left_stat.st_mode) && left_stat.st_size == right_stat.st_size) {
    return CompareContent(left, right, left_stat.st_size, path);
  }
  return absl::OkStatus();
}

void Comparer::CompareStat(const struct stat& left, const struct stat& right,
                           const std::string& path) {
  if (Compares(Property::kMode)) {
    CompareValue(path, "mode", fmt::format("{:04o}", left.st_mode & 07777),
                 fmt::format("{:04o}", right.st_mode & 07777));
  }
  if (Compares(Property::kOwner)) {
    CompareValue(path, "uid", left.st_uid, right.st_uid);
    CompareValue(path, "gid", left.st_gid, right.st_gid);
  }
  const bool is_directory = S_ISDIR(left.st_mode);
  if (Compares(is_directory ? Property::kDirectoryMtime : Property::kMtime)) {
    CompareValue(path, "mtime", Time(left.st_mtim), Time(right.st_mtim));
  }
  if (S_ISCHR(left.st_mode) || S_ISBLK(left.st_mode)) {
    CompareValue(path, "device", fmt::format("{}:{}", major(left.st_rdev), minor(left.st_rdev)),
                 fmt::format("{}:{}", major(right.st_rdev), minor(right.st_rdev)));
  }
  if (is_directory) return;
  CompareValue(path, "size", left.st_size, right.st_size);
  if (Compares(Property::kHardLinks)) {
    CompareValue(path, "link count", left.st_nlink, right.st_nlink);
  }
}

absl::Status Comparer::CompareXattrs(const Place& left, const Place& right,
                                     const std::string& path) {
  ASSIGN_OR_RETURN(const auto left_xattrs, ReadXattrs(left.directory, left.name), "left {}",
                   Printable(path));
  ASSIGN_OR_RETURN(const auto right_xattrs, ReadXattrs(right.directory, right.name), "right {}",
                   Printable(path));
  for (const auto& [name, value] : left_xattrs) {
    const auto other = right_xattrs.find(name);
    if (other == right_xattrs.end()) {
      Report(path, fmt::format("xattr {} is only left", Printable(name)));
    } else {
      CompareValue(path, fmt::format("xattr {}", Printable(name)), Printable(value),
                   Printable(other->second));
    }
  }
  for (const auto& [name, value] : right_xattrs) {
    if (!left_xattrs.contains(name)) {
      Report(path, fmt::format("xattr {} is only right", Printable(name)));
    }
  }
  return absl::OkStatus();
}

bool Comparer::CompareLinkGroup(const struct stat& left, const struct stat& right,
                                const std::string& path) {
  if (!Compares(Property::kHardLinks) || (left.st_nlink < 2 && right.st_nlink < 2)) return false;
  const auto [left_first, left_new] = first_left_.try_emplace({left.st_dev, left.st_ino}, path);
  const auto [right_first, right_new] =
      first_right_.try_emplace({right.st_dev, right.st_ino}, path);
  CompareValue(path, "first name of the inode", Printable(left_first->second),
               Printable(right_first->second));
  return !left_new && !right_new && left_first->second == right_first->second;
}

absl::Status Comparer::CompareDirectories(const Place& left, const Place& right,
                                          const std::string& path) {
  ASSIGN_OR_RETURN(const UniqueFd left_fd, OpenAt(left.directory, left.name, O_DIRECTORY),
                   "left {}", Printable(path));
  ASSIGN_OR_RETURN(const UniqueFd right_fd, OpenAt(right.directory, right.name, O_DIRECTORY),
                   "right {}", Printable(path));
  ASSIGN_OR_RETURN(std::vector<ListedName> left_names, ListDirectory(left_fd.get()), "left {}",
                   Printable(path));
  ASSIGN_OR_RETURN(std::vector<ListedName> right_names, ListDirectory(right_fd.get()), "right {}",
                   Printable(path));
  if (Compares(Property::kReaddir)) {
    RETURN_IF_ERROR(CheckListing(left_fd.get(), left_names, "left", path));
    RETURN_IF_ERROR(CheckListing(right_fd.get(), right_names, "right", path));
  }
  std::sort(left_names.begin(), left_names.end());
  std::sort(right_names.begin(), right_names.end());
  auto l = left_names.begin();
  auto r = right_names.begin();
  while ((l != left_names.end() || r != right_names.end()) && !Full()) {
    const bool only_left = r == right_names.end() || (l != left_names.end() && l->name < r->name);
    const bool only_right = l == left_names.end() || (r != right_names.end() && r->name < l->name);
    if (only_left) {
      Report(path + "/" + l++->name, "is only left");
    } else if (only_right) {
      Report(path + "/" + r++->name, "is only right");
    } else {
      if (l->name != "." && l->name != "..") {
        RETURN_IF_ERROR(CompareEntry({left_fd.get(), l->name}, {right_fd.get(), r->name},
                                     path + "/" + l->name));
      }
      ++l;
      ++r;
    }
  }
  return absl::OkStatus();
}

absl::Status Comparer::CheckListing(int directory, const std::vector<ListedName>& names,
                                    std::string_view side, const std::string& path) {
  std::set<std::string_view> seen;
  for (const ListedName& entry : names) {
    if (!seen.insert(entry.name).second) {
      Report(path, fmt::format("{} lists {} twice", side, Printable(entry.name)));
    }
    struct stat stat;
    if (fstatat(directory, entry.name.c_str(), &stat, AT_SYMLINK_NOFOLLOW) != 0) {
      Report(path, fmt::format("{} lists {}, which is not there", side, Printable(entry.name)));
    } else if (entry.type != IFTODT(stat.st_mode)) {
      Report(path, fmt::format("{} lists {} with d_type {}, but it is a {}", side,
                               Printable(entry.name), entry.type, TypeName(stat.st_mode)));
    }
  }
  for (const std::string_view name : {".", ".."}) {
    if (!seen.contains(name)) Report(path, fmt::format("{} does not list {}", side, name));
  }
  ASSIGN_OR_RETURN(const std::string problem, CheckSeeking(directory, names), "{} {}", side,
                   Printable(path));
  if (!problem.empty()) Report(path, fmt::format("{} {}", side, problem));
  return absl::OkStatus();
}

absl::Status Comparer::CompareContent(const Place& left, const Place& right, uint64_t size,
                                      const std::string& path) {
  if (!Compares(Property::kContent)) return absl::OkStatus();
  ASSIGN_OR_RETURN(const UniqueFd left_fd, OpenAt(left.directory, left.name, 0), "left {}",
                   Printable(path));
  ASSIGN_OR_RETURN(const UniqueFd right_fd, OpenAt(right.directory, right.name, 0), "right {}",
                   Printable(path));
  std::vector<Range> data = {{0, size}};
  if (Compares(Property::kHoles)) {
    ASSIGN_OR_RETURN(const Segments left_segments, ReadSegments(left_fd.get(), size), "left {}",
                     Printable(path));
    ASSIGN_OR_RETURN(const Segments right_segments, ReadSegments(right_fd.get(), size), "right {}",
                     Printable(path));
    if (!left_segments.problem.empty()) Report(path, "left " + left_segments.problem);
    if (!right_segments.problem.empty()) Report(path, "right " + right_segments.problem);
    data = Union(left_segments.data, right_segments.data);
  }
  std::vector<char> left_buffer(std::min<uint64_t>(size, kReadSize));
  std::vector<char> right_buffer(std::min<uint64_t>(size, kReadSize));
  for (const Range& range : data) {
    for (uint64_t offset = range.begin; offset < range.end; offset += kReadSize) {
      const size_t length = std::min<uint64_t>(kReadSize, range.end - offset);
      const auto left_bytes = std::span(left_buffer).first(length);
      const auto right_bytes = std::span(right_buffer).first(length);
      RETURN_IF_ERROR(ReadFull(left_fd.get(), offset, std::as_writable_bytes(left_bytes)),
                      "left {}", Printable(path));
      RETURN_IF_ERROR(ReadFull(right_fd.get(), offset, std::as_writable_bytes(right_bytes)),
                      "right {}", Printable(path));
      result_.bytes += length;
      const auto different =
          std::mismatch(left_bytes.begin(), left_bytes.end(), right_bytes.begin());
      if (different.first != left_bytes.end()) {
        Report(path, fmt::format("content differs at byte {}: {:#04x} left, {:#04x} right",
                                 offset + (different.first - left_bytes.begin()),
                                 static_cast<unsigned char>(*different.first),
                                 static_cast<unsigned char>(*different.second)));
        return absl::OkStatus();
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Property> ParseProperty(std::string_view name) {
  for (const auto& [known, property] : kPropertyNames) {
    if (known == name) return property;
  }
  return absl::InvalidArgumentError(fmt::format("\"{}\" is not a property", name));
}

absl::StatusOr<Comparison> CompareTrees(const std::string& left, const std::string& right,
                                        const CompareOptions& options) {
  Comparer comparer(options);
  RETURN_IF_ERROR(comparer.Compare(left, right));
  return comparer.Take();
}

}  // namespace lamina::compare
