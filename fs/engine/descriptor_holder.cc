// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/descriptor_holder.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "chunkstore/base/descriptor_message.h"

namespace lamina::fs {
namespace {

constexpr int kFirstInherited = 3;  // SD_LISTEN_FDS_START of sd_listen_fds(3)

// The value of an environment variable, which is removed; empty if it was not set.
std::string TakeVariable(const char* name) {
  const char* value = std::getenv(name);
  std::string text = value == nullptr ? "" : value;
  ::unsetenv(name);
  return text;
}

}  // namespace

absl::StatusOr<NotifySocket> NotifySocket::FromEnvironment() {
  const std::string path = TakeVariable("NOTIFY_SOCKET");
  if (path.empty()) return NotifySocket();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if ((path[0] != '/' && path[0] != '@') || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        fmt::format("NOTIFY_SOCKET is not a unix socket that can be used: {}", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  if (path[0] == '@') address.sun_path[0] = '\0';  // in the abstract name space
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoStatus(errno, "create a unix socket");
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    return ErrnoStatus(errno, "connect to NOTIFY_SOCKET " + path);
  }
  return NotifySocket(std::move(socket));
}

absl::Status NotifySocket::Send(std::string_view message, int fd) const {
  if (!valid()) return absl::OkStatus();
  const std::span<const int> fds(&fd, fd >= 0 ? 1 : 0);
  return Annotate(SendDescriptorMessage(socket_.get(), message, fds), "holder of descriptors");
}

absl::Status NotifySocket::Store(const std::string& name, int fd) const {
  return Send(fmt::format("FDSTORE=1\nFDNAME={}", name), fd);
}

absl::Status NotifySocket::Remove(const std::string& name) const {
  return Send(fmt::format("FDSTOREREMOVE=1\nFDNAME={}", name));
}

absl::StatusOr<std::multimap<std::string, UniqueFd>> InheritedDescriptors() {
  const std::string process = TakeVariable("LISTEN_PID");
  const std::string count_text = TakeVariable("LISTEN_FDS");
  const std::string names_text = TakeVariable("LISTEN_FDNAMES");
  std::multimap<std::string, UniqueFd> descriptors;
  if (process != std::to_string(::getpid())) return descriptors;  // meant for another one
  int count = 0;
  if (!absl::SimpleAtoi(count_text, &count) || count < 0 || count > INT_MAX - kFirstInherited) {
    return absl::InvalidArgumentError("LISTEN_FDS is not a number: " + count_text);
  }
  const std::vector<std::string> names = absl::StrSplit(names_text, ':');
  for (int i = 0; i < count; ++i) {
    UniqueFd fd(kFirstInherited + i);
    if (::fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) {
      return ErrnoStatus(errno, fmt::format("descriptor {} of LISTEN_FDS", fd.get()));
    }
    const auto index = static_cast<size_t>(i);
    descriptors.emplace(index < names.size() ? names[index] : "", std::move(fd));
  }
  return descriptors;
}

DescriptorHolder::DescriptorHolder(std::multimap<std::string, UniqueFd> descriptors,
                                   NotifySocket notify)
    : descriptors_(std::move(descriptors)), notify_(std::move(notify)) {
  if (UniqueFd socket = Take(kNotifyName); socket.valid()) {
    notify_ = NotifySocket(std::move(socket));
  }
}

UniqueFd DescriptorHolder::Take(const std::string& name) {
  std::lock_guard lock(mutex_);
  const auto found = descriptors_.lower_bound(name);
  if (found == descriptors_.end() || found->first != name) return UniqueFd();
  return std::move(descriptors_.extract(found).mapped());
}

std::vector<UniqueFd> DescriptorHolder::TakeAll(const std::string& name) {
  std::vector<UniqueFd> taken;
  for (UniqueFd fd = Take(name); fd.valid(); fd = Take(name)) taken.push_back(std::move(fd));
  return taken;
}

std::vector<std::string> DescriptorHolder::names() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, fd] : descriptors_) names.push_back(name);
  return names;
}

}  // namespace lamina::fs
