// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/fs_context.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace lamina::fs {
namespace {

// fsconfig(2) copies a string with its NUL into 256 bytes.
constexpr size_t kMaxValueLength = 255;

}  // namespace

absl::StatusOr<FsContext> FsContext::Open(const std::string& type) {
  UniqueFd fd(::fsopen(type.c_str(), FSOPEN_CLOEXEC));
  if (!fd.valid()) {
    const int error = errno;
    if (error == ENODEV) {
      return absl::UnimplementedError(fmt::format("the kernel has no file system {}", type));
    }
    return ErrnoStatus(error, fmt::format("fsopen {}", type));
  }
  return FsContext(type, std::move(fd));
}

absl::Status FsContext::SetFlag(const std::string& key) {
  if (::fsconfig(fd_.get(), FSCONFIG_SET_FLAG, key.c_str(), nullptr, 0) == 0) {
    return absl::OkStatus();
  }
  return Error(errno, fmt::format("option {}", key));
}

absl::Status FsContext::SetString(const std::string& key, const std::string& value) {
  if (::fsconfig(fd_.get(), FSCONFIG_SET_STRING, key.c_str(), value.c_str(), 0) == 0) {
    return absl::OkStatus();
  }
  return Error(errno, fmt::format("option {}={}", key, value));
}

absl::Status FsContext::SetPath(const std::string& key, const std::string& path) {
  // overlayfs takes a backslash for an escape character in some of its options.
  const bool usable = path.size() <= kMaxValueLength && path.find('\\') == std::string::npos;
  if (usable) return SetString(key, path);
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_PATH));
  paths_.push_back(std::move(fd));
  return SetString(key, fmt::format("/proc/self/fd/{}", paths_.back().get()));
}

absl::StatusOr<UniqueFd> FsContext::Mount(unsigned attributes) {
  if (::fsconfig(fd_.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0) {
    return Error(errno, "create");
  }
  UniqueFd mount(::fsmount(fd_.get(), FSMOUNT_CLOEXEC, attributes));
  if (!mount.valid()) return Error(errno, "fsmount");
  return mount;
}

absl::Status FsContext::Error(int error, const std::string& what) {
  error_ = error;
  // Each read gives one message, "e TEXT", "w TEXT" or "i TEXT", and ENODATA when there are no more
  // (kernel documentation, filesystems/mount_api.rst).
  std::string said;
  std::array<char, 512> message;
  for (;;) {
    const ssize_t length = ::read(fd_.get(), message.data(), message.size());
    if (length < 0 && errno == EINTR) continue;
    if (length <= 0) break;
    std::string_view text(message.data(), static_cast<size_t>(length));
    if (text.starts_with("e ")) text.remove_prefix(2);
    if (text.ends_with('\n')) text.remove_suffix(1);
    said += fmt::format("{}{}", said.empty() ? " (kernel: " : "; ", text);
  }
  if (!said.empty()) said += ")";
  return ErrnoStatus(error, fmt::format("{}: {}{}", type_, what, said));
}

absl::Status AttachMount(const UniqueFd& mount, const std::string& target) {
  const unsigned flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS;
  if (::move_mount(mount.get(), "", AT_FDCWD, target.c_str(), flags) == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus(errno, fmt::format("attach to {}", target));
}

}  // namespace lamina::fs
