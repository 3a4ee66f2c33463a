// SPDX-License-Identifier: Apache-2.0
#include "tools/laminad/sockets.h"

#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <system_error>

#include "fs/engine/socket.h"

namespace lamina::daemon {
namespace {

constexpr std::string_view kUnix = "unix:";
// systemd makes it, and the state directory, when it starts laminad (systemd/laminad.service).
constexpr std::string_view kRuntimeDirectory = "/run/lamina";

struct UnixSocket {
  const char* name;
  std::string path;
  std::string group;  // may be empty
};

std::vector<UnixSocket> UnixSocketsOf(const Config& config) {
  std::vector<UnixSocket> sockets = {
      {kControlName, fmt::format("{}/{}", config.state, fs::kControlSocket), ""}};
  if (!config.api_socket.empty()) {
    sockets.push_back({kApiName, config.api_socket, config.api_group});
  }
  if (!config.snapshotter_socket.empty()) {
    sockets.push_back({kSnapshotterName, config.snapshotter_socket, config.snapshotter_group});
  }
  if (config.metrics_listen.starts_with(kUnix)) {
    sockets.push_back(
        {kMetricsName, config.metrics_listen.substr(kUnix.size()), config.metrics_group});
  }
  return sockets;
}

absl::Status CheckPathsDiffer(const std::vector<UnixSocket>& sockets) {
  std::map<std::filesystem::path, std::string> names;
  for (const UnixSocket& socket : sockets) {
    const std::filesystem::path path(socket.path);
    std::error_code ignored;  // of a directory that is not there: it is compared as it is written
    const auto directory = std::filesystem::weakly_canonical(path.parent_path(), ignored);
    const auto [other, is_new] =
        names.emplace((ignored ? path.parent_path() : directory) / path.filename(), socket.name);
    if (is_new) continue;
    return absl::InvalidArgumentError(fmt::format("{} is the path of two sockets: {} and {}",
                                                  socket.path, other->second, socket.name));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> ListenAt(const std::string& path, const std::string& group) {
  const std::filesystem::path parts(path);
  ASSIGN_OR_RETURN(UniqueFd socket, fs::ListenUnix(parts.parent_path(), parts.filename()));
  if (!group.empty()) RETURN_IF_ERROR(fs::AllowGroup(path, group));
  return socket;
}

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// Of "ADDRESS:PORT", an IPv6 address in brackets.
absl::StatusOr<Addresses> AddressesOf(const std::string& where) {
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
  return Addresses(list, &::freeaddrinfo);
}

absl::StatusOr<UniqueFd> ListenTcp(const std::string& where) {
  ASSIGN_OR_RETURN(const Addresses list, AddressesOf(where));
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

absl::StatusOr<std::vector<ListeningSocket>> SocketsOf(const Config& config) {
  const std::vector<UnixSocket> unix_sockets = UnixSocketsOf(config);
  RETURN_IF_ERROR(CheckPathsDiffer(unix_sockets));
  std::vector<ListeningSocket> sockets;
  for (const auto& [name, path, group] : unix_sockets) {
    sockets.push_back({name, [path = path, group = group] { return ListenAt(path, group); }, path});
  }
  const std::string& metrics = config.metrics_listen;
  if (!metrics.empty() && !metrics.starts_with(kUnix)) {
    sockets.push_back({kMetricsName, [metrics] { return ListenTcp(metrics); }, ""});
  }
  return sockets;
}

absl::Status CheckSockets(const Config& config) {
  const std::vector<UnixSocket> sockets = UnixSocketsOf(config);
  RETURN_IF_ERROR(CheckPathsDiffer(sockets));
  for (const auto& [name, path, group] : sockets) {
    const std::filesystem::path parts(path);
    const std::string directory = parts.parent_path();
    std::error_code ignored;
    const bool is_made = directory == config.state || directory == kRuntimeDirectory;
    if (is_made && !std::filesystem::exists(directory, ignored)) continue;
    RETURN_IF_ERROR(fs::CheckListenUnix(directory, parts.filename()), "{} socket", name);
    if (!group.empty()) RETURN_IF_ERROR(fs::FindGroup(group).status(), "{} socket", name);
  }
  const std::string& metrics = config.metrics_listen;
  if (metrics.empty() || metrics.starts_with(kUnix)) return absl::OkStatus();
  return AddressesOf(metrics).status();
}

}  // namespace lamina::daemon
