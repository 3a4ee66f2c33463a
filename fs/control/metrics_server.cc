// SPDX-License-Identifier: Apache-2.0
//
// As much of HTTP as a scraper needs: one request on a connection, which is then closed. Not
// prometheus-cpp's own server, which cannot listen on a unix socket.
#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "fs/control/metrics.h"
#include "fs/engine/socket.h"

namespace lamina::fs {
namespace {

using Clock = std::chrono::steady_clock;

// From its connection to the end of its answer: a client that is slower or says more is not a scraper.
constexpr std::chrono::milliseconds kPatience(2'000);
constexpr size_t kMaxRequest = 16 * 1024;
// One more, and the oldest is closed.
constexpr size_t kMostConnections = 64;

// One request and its answer; never waits.
class Connection {
 public:
  explicit Connection(UniqueFd socket) : socket_(std::move(socket)) {
    const int flags = ::fcntl(socket_.get(), F_GETFL);
    ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK);
  }

  int fd() const { return socket_.get(); }
  Clock::time_point deadline() const { return deadline_; }
  short events() const { return answer_.empty() ? POLLIN : POLLOUT; }

  // Reads or writes what can be now. False once there is nothing more to do.
  bool GoOn(Engine& engine) {
    if (answer_.empty() && !Read()) return false;
    if (answer_.empty() && HasHead()) Answer(engine);
    return answer_.empty() || Write();
  }

 private:
  bool HasHead() const {
    return ended_ || head_.size() >= kMaxRequest || head_.find("\r\n\r\n") != std::string::npos;
  }

  bool Read() {
    char buffer[1024];
    while (!HasHead()) {
      const ssize_t got = ::recv(socket_.get(), buffer, sizeof(buffer), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno == EAGAIN;
      ended_ = got == 0;
      head_.append(buffer, static_cast<size_t>(got));
    }
    return true;
  }

  void Answer(Engine& engine) {
    const std::string_view target = std::string_view(head_).substr(0, head_.find_first_of("?\r\n"));
    const bool found = target == "GET /metrics" || target.starts_with("GET /metrics ");
    const std::string body = found ? MetricsText(engine) : "GET /metrics is all there is\n";
    answer_ = fmt::format(
        "HTTP/1.1 {}\r\n"
        "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        "Content-Length: {}\r\n"
        "Connection: close\r\n\r\n{}",
        found ? "200 OK" : "404 Not Found", body.size(), body);
  }

  bool Write() {
    while (sent_ < answer_.size()) {
      const ssize_t sent =
          ::send(socket_.get(), answer_.data() + sent_, answer_.size() - sent_, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return errno == EAGAIN;  // otherwise the scraper has gone
      sent_ += static_cast<size_t>(sent);
    }
    return false;
  }

  UniqueFd socket_;
  const Clock::time_point deadline_ = Clock::now() + kPatience;
  std::string head_;
  bool ended_ = false;  // nothing comes after head_
  std::string answer_;
  size_t sent_ = 0;
};

// All in one thread, so that who says nothing holds up neither the others nor the end.
class HttpMetricsServer final : public MetricsServer {
 public:
  HttpMetricsServer(Engine& engine, UniqueFd listener)
      : engine_(engine), listener_(std::move(listener)) {}
  ~HttpMetricsServer() override {
    if (stop_.valid()) ::eventfd_write(stop_.get(), 1);
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Start() {
    stop_.Reset(::eventfd(0, EFD_CLOEXEC));
    if (!stop_.valid()) return ErrnoStatus(errno, "eventfd");
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  }

 private:
  void Run() {
    while (true) {
      std::vector<pollfd> events = {{.fd = stop_.get(), .events = POLLIN},
                                    {.fd = listener_.get(), .events = POLLIN}};
      const size_t first = events.size();
      for (const Connection& connection : connections_) {
        events.push_back({.fd = connection.fd(), .events = connection.events()});
      }
      if (::poll(events.data(), events.size(), Patience()) < 0 && errno != EINTR) {
        spdlog::error("metrics socket: {}", std::string(ErrnoStatus(errno, "poll").message()));
        return;
      }
      if (events[0].revents != 0) return;
      const Clock::time_point now = Clock::now();
      size_t index = first;
      connections_.remove_if([&](Connection& connection) {
        const bool ready = events[index++].revents != 0;
        return (ready && !connection.GoOn(engine_)) || connection.deadline() <= now;
      });
      if (events[1].revents != 0) Accept();
    }
  }

  void Accept() {
    absl::StatusOr<UniqueFd> socket = AcceptUnix(listener_.get());
    if (!socket.ok() && accept_failed_.ok()) {
      spdlog::error("metrics socket: {}", std::string(socket.status().message()));
    }
    accept_failed_ = socket.status();
    if (!socket.ok() || !socket->valid()) return;
    if (connections_.size() == kMostConnections) connections_.pop_front();
    connections_.emplace_back(*std::move(socket));
  }

  // Milliseconds until the first deadline, as poll(2) takes them.
  int Patience() const {
    if (connections_.empty()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(connections_.front().deadline() -
                                                                   Clock::now());
    return static_cast<int>(std::max<int64_t>(left.count(), 0));
  }

  Engine& engine_;
  const UniqueFd listener_;
  UniqueFd stop_;                      // readable (eventfd) once the thread shall end
  std::list<Connection> connections_;  // oldest first
  absl::Status accept_failed_;         // as long as it lasts
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(Engine& engine,
                                                                    UniqueFd listener) {
  auto server = std::make_unique<HttpMetricsServer>(engine, std::move(listener));
  RETURN_IF_ERROR(server->Start());
  return server;
}

}  // namespace lamina::fs
