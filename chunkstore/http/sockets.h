// SPDX-License-Identifier: Apache-2.0
//
// The sockets of a client's connections, to get rid of those that are dead. libcurl keeps a connection
// with several streams (HTTP/2) when one of them has timed out, and uses it for the next request.
#ifndef LAMINA_CHUNKSTORE_HTTP_SOCKETS_H_
#define LAMINA_CHUNKSTORE_HTTP_SOCKETS_H_

#include <chrono>
#include <set>

#include "chunkstore/http/curl_library.h"

namespace lamina::http {

// Only the client's event thread uses it. Outlives the connections.
class Sockets {
 public:
  // What is sent and not acknowledged for this long ends a connection.
  explicit Sockets(std::chrono::milliseconds user_timeout) : user_timeout_(user_timeout) {}

  // Has the handle open its connections here.
  void Use(CURL* handle);
  // After a request of the handle has timed out: ends its connection, with all that is under way there,
  // if nothing at all has come over it for `silence`.
  void EndIfSilent(CURL* handle, std::chrono::milliseconds silence);

 private:
  static curl_socket_t Open(void* self, curlsocktype purpose, curl_sockaddr* address);
  static int Close(void* self, curl_socket_t socket);

  const std::chrono::milliseconds user_timeout_;
  std::set<curl_socket_t> sockets_;
};

}  // namespace lamina::http

#endif  // LAMINA_CHUNKSTORE_HTTP_SOCKETS_H_
