// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/http/sockets.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

namespace lamina::http {
namespace {

// 0 if it has none.
long LocalPort(curl_socket_t socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  }
  return 0;
}

bool IsSilent(curl_socket_t socket, std::chrono::milliseconds silence) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  return ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
         std::chrono::milliseconds(info.tcpi_last_data_recv) >= silence;
}

}  // namespace

void Sockets::Use(CURL* handle) {
  Curl().easy_setopt(handle, CURLOPT_OPENSOCKETFUNCTION, &Sockets::Open);
  Curl().easy_setopt(handle, CURLOPT_OPENSOCKETDATA, static_cast<void*>(this));
  Curl().easy_setopt(handle, CURLOPT_CLOSESOCKETFUNCTION, &Sockets::Close);
  Curl().easy_setopt(handle, CURLOPT_CLOSESOCKETDATA, static_cast<void*>(this));
}

void Sockets::EndIfSilent(CURL* handle, std::chrono::milliseconds silence) {
  // libcurl does not say which socket a request has used, if others still use it.
  long port = 0;
  if (Curl().easy_getinfo(handle, CURLINFO_LOCAL_PORT, &port) != CURLE_OK || port <= 0) return;
  for (const curl_socket_t socket : sockets_) {
    // Connections to several hosts may have the same port; those are not harmed unless they are silent,
    // which means that they are not in use or dead as well.
    if (LocalPort(socket) == port && IsSilent(socket, silence)) ::shutdown(socket, SHUT_RDWR);
  }
}

curl_socket_t Sockets::Open(void* self, curlsocktype /*purpose*/, curl_sockaddr* address) {
  auto* sockets = static_cast<Sockets*>(self);
  const curl_socket_t socket =
      ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
  if (socket < 0) return CURL_SOCKET_BAD;
  // The kernel would wait for a quarter of an hour (tcp(7), tcp_retries2), and all that is sent over the
  // connection meanwhile would wait as well. Failing leaves it so.
  const auto timeout = static_cast<unsigned>(sockets->user_timeout_.count());
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof(timeout));
  sockets->sockets_.insert(socket);
  return socket;
}

int Sockets::Close(void* self, curl_socket_t socket) {
  static_cast<Sockets*>(self)->sockets_.erase(socket);
  return ::close(socket);
}

}  // namespace lamina::http
