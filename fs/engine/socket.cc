// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/socket.h"

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace lamina::fs {
namespace {

// An address through /proc/self/fd, which is short whatever the path of the directory.
struct Address {
  UniqueFd directory;
  sockaddr_un value{};
};

// Fits with any descriptor's number, and kNew behind it.
constexpr size_t kMaxName = 80;
constexpr std::string_view kNew = ".new";

absl::Status CheckName(const std::string& name) {
  if (!name.empty() && name.size() <= kMaxName) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("socket name '{}' does not have 1 to {} bytes", name, kMaxName));
}

absl::StatusOr<Address> MakeAddress(const std::string& directory, const std::string& name) {
  Address address;
  ASSIGN_OR_RETURN(address.directory, OpenFile(directory, O_PATH | O_DIRECTORY));
  const std::string path = fmt::format("/proc/self/fd/{}/{}", address.directory.get(), name);
  if (path.size() >= sizeof(address.value.sun_path)) {
    return absl::InvalidArgumentError(fmt::format("socket name {} is too long", name));
  }
  address.value.sun_family = AF_UNIX;
  std::memcpy(address.value.sun_path, path.c_str(), path.size() + 1);
  return address;
}

absl::StatusOr<UniqueFd> NewSocket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "create a unix socket");
  return fd;
}

const sockaddr* Generic(const Address& address) {
  return reinterpret_cast<const sockaddr*>(&address.value);
}

// What is there and no socket may be worth something.
absl::Status CheckReplaceable(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::OkStatus() : ErrnoStatus(errno, "look at " + path);
  }
  if (S_ISSOCK(info.st_mode)) return absl::OkStatus();
  return absl::AlreadyExistsError(fmt::format("listen on {}: what is there is not a socket", path));
}

}  // namespace

absl::Status CheckListenUnix(const std::string& directory, const std::string& name) {
  RETURN_IF_ERROR(CheckName(name));
  RETURN_IF_ERROR(OpenFile(directory, O_PATH | O_DIRECTORY).status());
  for (const std::string_view end : {std::string_view(), kNew}) {
    RETURN_IF_ERROR(CheckReplaceable(fmt::format("{}/{}{}", directory, name, end)));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> ListenUnix(const std::string& directory, const std::string& name) {
  RETURN_IF_ERROR(CheckListenUnix(directory, name));
  const std::string path = directory + "/" + name;
  // Under its name once it listens: whoever finds it can connect.
  const std::string new_name = fmt::format("{}{}", name, kNew);
  const std::string new_path = directory + "/" + new_name;
  if (::unlink(new_path.c_str()) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, "unlink " + new_path);
  }
  ASSIGN_OR_RETURN(const Address address, MakeAddress(directory, new_name));
  ASSIGN_OR_RETURN(UniqueFd fd, NewSocket());
  // On Linux the mode of the socket's own inode decides who may connect, and bind(2) takes it from
  // fchmod(2) before it: no moment in which others could.
  if (::fchmod(fd.get(), 0600) != 0 ||
      ::bind(fd.get(), Generic(address), sizeof(address.value)) != 0) {
    return ErrnoStatus(errno, "listen on " + path);
  }
  if (::listen(fd.get(), 128) != 0 || ::rename(new_path.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(new_path.c_str());
    return ErrnoStatus(error, "listen on " + path);
  }
  return fd;
}

absl::StatusOr<gid_t> FindGroup(const std::string& group) {
  std::vector<char> buffer(64 * 1024);
  struct group entry {};
  struct group* found = nullptr;
  const int error = ::getgrnam_r(group.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (error != 0) return ErrnoStatus(error, "look up group " + group);
  if (found == nullptr) return absl::NotFoundError(fmt::format("there is no group {}", group));
  return entry.gr_gid;
}

absl::Status AllowGroup(const std::string& socket_path, const std::string& group) {
  ASSIGN_OR_RETURN(const gid_t id, FindGroup(group));
  // The owner stays; until the mode is set nobody is let in who was not before.
  if (::chown(socket_path.c_str(), static_cast<uid_t>(-1), id) != 0 ||
      ::chmod(socket_path.c_str(), 0660) != 0) {
    return ErrnoStatus(errno, fmt::format("give {} to group {}", socket_path, group));
  }
  return absl::OkStatus();
}

absl::Status SetSocketPatience(int socket, std::chrono::milliseconds patience) {
  const timeval time{.tv_sec = patience.count() / 1000, .tv_usec = patience.count() % 1000 * 1000};
  for (const int direction : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    if (::setsockopt(socket, SOL_SOCKET, direction, &time, sizeof(time)) != 0) {
      return ErrnoStatus(errno, "set how long a socket waits");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& directory, const std::string& name,
                                     std::chrono::milliseconds patience) {
  ASSIGN_OR_RETURN(const Address address, MakeAddress(directory, name));
  ASSIGN_OR_RETURN(UniqueFd fd, NewSocket());
  // While the queue is full connect(2) waits as long as a send would. 0 would be for ever.
  RETURN_IF_ERROR(SetSocketPatience(fd.get(), std::max(patience, std::chrono::milliseconds(1))));
  int error = 0;
  do {
    error = ::connect(fd.get(), Generic(address), sizeof(address.value)) == 0 ? 0 : errno;
  } while (error == EINTR);
  const std::string text = fmt::format("connect to {}/{}", directory, name);
  if (error == ECONNREFUSED || error == ENOENT) {
    return absl::UnavailableError(text + ": nothing listens there");
  }
  if (error == EAGAIN) {
    return absl::DeadlineExceededError(text + ": who listens there takes no connections");
  }
  if (error != 0) return ErrnoStatus(error, text);
  RETURN_IF_ERROR(SetSocketPatience(fd.get(), std::chrono::milliseconds(0)));
  return fd;
}

absl::StatusOr<UniqueFd> AcceptUnix(int listener) {
  UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.valid()) return socket;
  const int error = errno;
  if (error == EINTR || error == EAGAIN || error == ECONNABORTED) return UniqueFd();
  constexpr int kPauseMilliseconds = 50;
  ::poll(nullptr, 0, kPauseMilliseconds);
  return ErrnoStatus(error, "accept a connection");
}

absl::StatusOr<std::string> ReadLine(int socket) {
  std::string line;
  char buffer[4096];
  while (true) {
    const ssize_t got = ::recv(socket, buffer, sizeof(buffer), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno != ECONNRESET) return ErrnoStatus(errno, "read from the control socket");
    if (got <= 0) return absl::UnavailableError("the control connection was closed");
    const void* newline = std::memchr(buffer, '\n', static_cast<size_t>(got));
    if (newline != nullptr) {
      line.append(buffer, static_cast<size_t>(static_cast<const char*>(newline) - buffer));
      return line;
    }
    line.append(buffer, static_cast<size_t>(got));
    if (line.size() > kMaxLine) {
      return absl::ResourceExhaustedError(
          fmt::format("a line on the control socket is longer than {} bytes", kMaxLine));
    }
  }
}

absl::Status WriteLine(int socket, std::string_view line) {
  std::string text(line);
  text += '\n';
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t put = ::send(socket, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return ErrnoStatus(errno, "write to the control socket");
    sent += static_cast<size_t>(put);
  }
  return absl::OkStatus();
}

}  // namespace lamina::fs
