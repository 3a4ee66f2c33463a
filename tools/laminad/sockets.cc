// SPDX-License-Identifier: Apache-2.0
#include "tools/laminad/sockets.h"

#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <filesystem>
#include <memory>

#include "fs/engine/socket.h"

namespace lamina::daemon {
namespace {

constexpr std::string_view kUnix = "unix:";

absl::StatusOr<UniqueFd> ListenAt(const std::string& path, const std::string& group) {
  const std::filesystem::path parts(path);
  ASSIGN_OR_RETURN(UniqueFd socket, fs::ListenUnix(parts.parent_path(), parts.filename()));
  if (!group.empty()) RETURN_IF_ERROR(fs::AllowGroup(path, group));
  return socket;
}

// "ADDRESS:PORT", an IPv6 address in brackets.
absl::StatusOr<UniqueFd> ListenTcp(const std::string& where) {
  const size_t colon = where.rfind(':');
  std::string address = where.substr(0, colon);
  if (address.starts_with('[') && address.ends_with(']')) {
    address = address.substr(1, address.size() - 2);
  }
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(address.empty() ? nullptr : address.c_str(),
                                  where.substr(colon + 1).c_str(), &hints, &list);
  if (error != 0) {
    return absl::InvalidArgumentError(fmt::format("listen on {}: {}", where, gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  UniqueFd socket(::socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoStatus(errno, "create a socket");
  const int yes = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (::bind(socket.get(), list->ai_addr, list->ai_addrlen) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    return ErrnoStatus(errno, "listen on " + where);
  }
  return socket;
}

}  // namespace

std::vector<ListeningSocket> SocketsOf(const Config& config) {
  std::vector<ListeningSocket> sockets;
  const std::string control = fmt::format("{}/{}", config.state, fs::kControlSocket);
  sockets.push_back({kControlName, [control] { return ListenAt(control, ""); }, control});
  if (const std::string& path = config.api_socket; !path.empty()) {
    sockets.push_back(
        {kApiName, [path, group = config.api_group] { return ListenAt(path, group); }, path});
  }
  if (const std::string& path = config.snapshotter_socket; !path.empty()) {
    sockets.push_back({kSnapshotterName,
                       [path, group = config.snapshotter_group] { return ListenAt(path, group); },
                       path});
  }
  const std::string& metrics = config.metrics_listen;
  if (metrics.starts_with(kUnix)) {
    const std::string path = metrics.substr(kUnix.size());
    sockets.push_back({kMetricsName,
                       [path, group = config.metrics_group] { return ListenAt(path, group); },
                       path});
  } else if (!metrics.empty()) {
    sockets.push_back({kMetricsName, [metrics] { return ListenTcp(metrics); }, ""});
  }
  return sockets;
}

}  // namespace lamina::daemon
