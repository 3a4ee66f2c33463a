// SPDX-License-Identifier: Apache-2.0
//
// As much of HTTP as a scraper needs: one request on a connection, which is then closed. Not
// prometheus-cpp's own server, which cannot listen on a unix socket.
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "fs/control/acceptor.h"
#include "fs/control/metrics.h"

namespace lamina::fs {
namespace {

// A client that is slower or says more is not a scraper. There is one at a time.
constexpr timeval kTimeout = {.tv_sec = 2, .tv_usec = 0};
constexpr size_t kMaxRequest = 16 * 1024;

// The head of a request, or as much as came of it.
std::string ReadHead(int socket) {
  std::string head;
  char buffer[1024];
  while (head.size() < kMaxRequest && head.find("\r\n\r\n") == std::string::npos) {
    const ssize_t got = ::recv(socket, buffer, sizeof(buffer), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    head.append(buffer, static_cast<size_t>(got));
  }
  return head;
}

void Send(int socket, std::string_view text) {
  while (!text.empty()) {
    const ssize_t sent = ::send(socket, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return;  // the scraper has gone
    text.remove_prefix(static_cast<size_t>(sent));
  }
}

class HttpMetricsServer final : public MetricsServer {
 public:
  HttpMetricsServer(Engine& engine, UniqueFd listener)
      : engine_(engine),
        acceptor_(std::move(listener), [this](const UniqueFd& socket) { Answer(socket.get()); }) {}

  absl::Status Run() { return acceptor_.Start("metrics socket"); }

 private:
  void Answer(int socket) {
    ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &kTimeout, sizeof(kTimeout));
    ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &kTimeout, sizeof(kTimeout));
    const std::string head = ReadHead(socket);
    const std::string_view target = std::string_view(head).substr(0, head.find_first_of("?\r\n"));
    const bool found = target == "GET /metrics" || target.starts_with("GET /metrics ");
    const std::string body = found ? MetricsText(engine_) : "GET /metrics is all there is\n";
    Send(socket, fmt::format("HTTP/1.1 {}\r\n"
                             "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                             "Content-Length: {}\r\n"
                             "Connection: close\r\n\r\n",
                             found ? "200 OK" : "404 Not Found", body.size()));
    Send(socket, body);
  }

  Engine& engine_;
  Acceptor acceptor_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(Engine& engine,
                                                                    UniqueFd listener) {
  auto server = std::make_unique<HttpMetricsServer>(engine, std::move(listener));
  RETURN_IF_ERROR(server->Run());
  return server;
}

}  // namespace lamina::fs
