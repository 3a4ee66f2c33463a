// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/mountinfo.h"

#include <fcntl.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace lamina::fs {
namespace {

constexpr const char* kMountInfo = "/proc/self/mountinfo";

// Takes the next field, up to a space, off the front of `line`.
std::string_view NextField(std::string_view& line) {
  const size_t end = std::min(line.find(' '), line.size());
  const std::string_view field = line.substr(0, end);
  line.remove_prefix(std::min(end + 1, line.size()));
  return field;
}

bool IsOctal(char digit) { return digit >= '0' && digit <= '7'; }

// The kernel writes space, tab, newline, backslash and '#' as a backslash and three octal digits.
std::string Unescape(std::string_view field) {
  std::string text;
  for (size_t i = 0; i < field.size(); ++i) {
    if (field[i] == '\\' && i + 3 < field.size() && IsOctal(field[i + 1]) &&
        IsOctal(field[i + 2]) && IsOctal(field[i + 3])) {
      text += static_cast<char>((field[i + 1] - '0') * 64 + (field[i + 2] - '0') * 8 +
                                (field[i + 3] - '0'));
      i += 3;
    } else {
      text += field[i];
    }
  }
  return text;
}

// "98:0"
dev_t ParseDevice(std::string_view field) {
  unsigned major = 0;
  unsigned minor = 0;
  const char* end = field.data() + field.size();
  const char* colon = std::from_chars(field.data(), end, major).ptr;
  if (colon != end) std::from_chars(colon + 1, end, minor);
  return makedev(major, minor);
}

// "36 35 98:0 /root /target rw,noatime master:1 - ext3 /dev/root rw,errors=continue" (proc(5)).
std::optional<MountInfo> ParseLine(std::string_view line) {
  MountInfo mount;
  const std::string_view id = NextField(line);
  if (std::from_chars(id.data(), id.data() + id.size(), mount.id).ec != std::errc()) {
    return std::nullopt;
  }
  NextField(line);  // parent
  mount.device = ParseDevice(NextField(line));
  NextField(line);  // root
  mount.target = Unescape(NextField(line));
  NextField(line);                                           // options of the mount
  while (!line.empty() && NextField(line) != "-") continue;  // any number of optional fields
  mount.type = Unescape(NextField(line));
  mount.source = Unescape(NextField(line));
  mount.super_options = Unescape(NextField(line));
  return mount;
}

// /proc files have no size, so they are read until they end.
absl::StatusOr<std::string> ReadToEnd(const char* path) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  std::string content;
  size_t size = 0;
  for (;;) {
    content.resize(size + 64 * 1024);
    const ssize_t got = ::read(fd.get(), content.data() + size, content.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, fmt::format("read {}", path));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  content.resize(size);
  return content;
}

// `target` as mountinfo would show it. Whatever is mounted there may not answer any more (a FUSE
// file system whose server died), so the last component is not looked at if that fails.
std::string CanonicalTarget(std::string target) {
  if (auto path = RealPath(target); path.ok()) return *path;
  while (target.size() > 1 && target.ends_with('/')) target.pop_back();
  const size_t slash = target.rfind('/');
  const std::string parent = slash == std::string::npos ? "." : target.substr(0, slash + 1);
  const std::string name = slash == std::string::npos ? target : target.substr(slash + 1);
  const auto path = RealPath(parent);
  if (!path.ok()) return target;
  return *path == "/" ? "/" + name : *path + "/" + name;
}

// Mounts on one path are listed in the order they were made: the last is on top.
std::optional<MountInfo> TopMount(std::span<const MountInfo> mounts, const std::string& canonical) {
  for (auto mount = mounts.rbegin(); mount != mounts.rend(); ++mount) {
    if (mount->target == canonical) return *mount;
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<std::vector<MountInfo>> ReadMountInfo() {
  ASSIGN_OR_RETURN(const std::string content, ReadToEnd(kMountInfo));
  std::vector<MountInfo> mounts;
  std::string_view rest = content;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    if (auto mount = ParseLine(rest.substr(0, end))) mounts.push_back(*std::move(mount));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return mounts;
}

absl::StatusOr<std::optional<MountInfo>> FindMount(const std::string& target) {
  return FindMountAt(CanonicalTarget(target));
}

absl::StatusOr<std::optional<MountInfo>> FindMountAt(const std::string& canonical) {
  ASSIGN_OR_RETURN(const std::vector<MountInfo> mounts, ReadMountInfo());
  return TopMount(mounts, canonical);
}

std::optional<MountInfo> FindMountIn(std::span<const MountInfo> mounts, const std::string& target) {
  return TopMount(mounts, CanonicalTarget(target));
}

absl::StatusOr<std::string> RealPath(const std::string& path) {
  char* resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return ErrnoStatus(errno, path);
  std::string result(resolved);
  ::free(resolved);
  return result;
}

std::optional<std::string> LoopBackingFile(const std::string& source) {
  constexpr std::string_view kDevices = "/dev/";
  if (!source.starts_with("/dev/loop")) return std::nullopt;
  // sysfs has the path, and " (deleted)" behind it if it is gone.
  std::ifstream file("/sys/block/" + source.substr(kDevices.size()) + "/loop/backing_file");
  if (!file.is_open()) return std::nullopt;
  std::string path(std::istreambuf_iterator<char>(file), {});  // which may have newlines in it
  if (path.ends_with('\n')) path.pop_back();
  return path;
}

std::string MountNamespace() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/ns/mnt", error).native();
}

}  // namespace lamina::fs
