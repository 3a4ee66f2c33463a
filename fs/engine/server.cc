// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/server.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "fs/engine/engine.h"
#include "fs/engine/messages.h"
#include "fs/engine/prefetch_messages.h"
#include "fs/engine/socket.h"

namespace lamina::fs {
namespace {

using nlohmann::json;

// How long a client may take to send its request.
constexpr timeval kRequestTimeout = {.tv_sec = 10, .tv_usec = 0};
// How long an engine that was started on demand waits for its first request.
constexpr int kFirstRequestMilliseconds = 10'000;
// How often detached mounts are asked whether their last user has gone.
constexpr int kIdlePollMilliseconds = 5;
// And where nothing waits for that.
constexpr int kDetachedPollMilliseconds = 1'000;
// How long those who were answered can see whether the engine ends, unless it has mounts. A mount whose
// last user has gone is let go of in less; one that is still read may last for days.
constexpr std::chrono::milliseconds kEndGrace(200);

absl::StatusOr<json> ExecuteCache(Engine& engine, std::string_view op, const json& request) {
  if (op == "cache-list") return ToJson(engine.images().Report());
  if (op == "cache-clean") {
    std::optional<uint64_t> bytes;
    if (const auto field = request.find("bytes"); field != request.end()) {
      if (!field->is_number_unsigned()) {
        return absl::InvalidArgumentError("field 'bytes' is not a size");
      }
      bytes = field->get<uint64_t>();
    }
    ASSIGN_OR_RETURN(const CacheCleanup cleanup, engine.images().Clean(bytes), "clean the cache");
    return ToJson(cleanup);
  }
  ASSIGN_OR_RETURN(const std::string image, StringField(request, "image"));
  if (op == "cache-pin") {
    ASSIGN_OR_RETURN(const bool pinned, BoolField(request, "pinned"));
    registry::Settings registry;
    if (const auto field = request.find("registry"); field != request.end()) {
      ASSIGN_OR_RETURN(registry, ParseRegistrySettings(*field));
    }
    RETURN_IF_ERROR(engine.PinImage(image, pinned, registry), "{} {}", pinned ? "pin" : "unpin",
                    image);
    return json::object();
  }
  ASSIGN_OR_RETURN(const CacheCleanup cleanup, engine.images().Remove(image), "remove {}", image);
  return ToJson(cleanup);
}

absl::StatusOr<json> Execute(Engine& engine, const ServerOptions& options, const json& request) {
  ASSIGN_OR_RETURN(const std::string op, StringField(request, "op"));
  if (op == "mount") {
    ASSIGN_OR_RETURN(const MountRequest mount, ParseMountRequest(request));
    ASSIGN_OR_RETURN(const MountDescription description, engine.Mount(mount));
    json reply = ToJson(description);
    reply["config"] = description.config;
    return reply;
  }
  if (op == "fork") {
    ASSIGN_OR_RETURN(const ForkRequest fork, ParseForkRequest(request));
    ASSIGN_OR_RETURN(const std::vector<MountDescription> mounts, engine.Fork(fork));
    json array = json::array();
    for (const MountDescription& mount : mounts) array.push_back(ToJson(mount));
    return array;
  }
  if (op == "unmount") {
    ASSIGN_OR_RETURN(const std::string target, StringField(request, "target"));
    RETURN_IF_ERROR(engine.Unmount(target));
    // Whether who asked has to wait to see this process end.
    return json{{"stays", !options.end_when_idle || engine.HasMounts()}};
  }
  if (op == "report") {
    std::optional<std::string> target;
    if (request.contains("target")) {
      ASSIGN_OR_RETURN(target, StringField(request, "target"));
    }
    ASSIGN_OR_RETURN(const std::vector<MountReport> reports, engine.Report(target));
    json array = json::array();
    for (const MountReport& report : reports) array.push_back(ToJson(report));
    return array;
  }
  for (const char* known : {"cache-list", "cache-clean", "cache-pin", "cache-remove"}) {
    if (op == known) return ExecuteCache(engine, op, request);
  }
  if (IsPrefetchOp(op)) return ExecutePrefetchOp(engine, op, request);
  if (options.execute) return options.execute(op, request);
  return absl::InvalidArgumentError(fmt::format("unknown op '{}'", op));
}

// A request that needs more memory than there is must not take the mounts of others with it.
absl::StatusOr<json> ExecuteSafely(Engine& engine, const ServerOptions& options,
                                   const json& request) {
  try {
    return Execute(engine, options, request);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("not enough memory for the request");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

// Undoes mounts whose client has gone without an answer.
void UndoMounts(Engine& engine, const json& reply) {
  const auto made = reply.find("ok");
  if (made == reply.end()) return;
  for (const json& mount : made->is_array() ? *made : json::array({*made})) {
    const absl::StatusOr<std::string> target = StringField(mount, "target");
    if (!target.ok()) continue;
    spdlog::warn("who asked for the mount at {} has gone: unmounting it", *target);
    if (absl::Status status = engine.Unmount(*target); !status.ok()) {
      spdlog::error("{}", std::string(status.message()));
    }
  }
}

// One request on a thread of its own.
class Connection {
 public:
  explicit Connection(UniqueFd socket) : socket_(std::move(socket)) {}
  ~Connection() {
    ::shutdown(socket_.get(), SHUT_RD);  // a client that sends nothing must not hold us up
    if (thread_.joinable()) thread_.join();
  }

  // kResourceExhausted, which the client is told, if there is no thread for it.
  absl::Status Start(Engine& engine, const ServerOptions& options, int wake_fd) {
    try {
      thread_ = std::thread([this, &engine, &options, wake_fd] {
        Serve(engine, options);
        done_at_ = Clock::now();
        done_ = true;
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = ::write(wake_fd, &one, sizeof(one));
      });
      return absl::OkStatus();
    } catch (const std::exception& error) {
      const absl::Status status =
          absl::ResourceExhaustedError(fmt::format("no thread for the request: {}", error.what()));
      // It fits into the socket's buffer.
      WriteLine(socket_.get(), ErrorToJson(status).dump()).IgnoreError();
      return status;
    }
  }

  bool done() const { return done_; }
  bool done_since(std::chrono::milliseconds time) const {
    return done_ && Clock::now() - done_at_ >= time;
  }
  // The descriptor stays open until the process ends, so that the client sees when that is.
  void LeaveOpen() { socket_.Release(); }

 private:
  void Serve(Engine& engine, const ServerOptions& options) {
    // A client that does not read its answer must not hold us up for long either.
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &kRequestTimeout, sizeof(kRequestTimeout));
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &kRequestTimeout, sizeof(kRequestTimeout));
    const absl::StatusOr<std::string> line = ReadLine(socket_.get());
    if (!line.ok()) return;
    const json request = json::parse(*line, nullptr, /*allow_exceptions=*/false);
    absl::StatusOr<json> result = ExecuteSafely(engine, options, request);
    const json reply = result.ok() ? json{{"ok", *result}} : ErrorToJson(result.status());
    const std::string text = reply.dump(-1, ' ', false, json::error_handler_t::replace);
    if (absl::Status status = WriteLine(socket_.get(), text); !status.ok()) {
      spdlog::warn("{}", std::string(status.message()));
      const std::string op = StringField(request, "op").value_or("");
      if (op == "mount" || op == "fork") UndoMounts(engine, reply);
    }
  }

  using Clock = std::chrono::steady_clock;

  UniqueFd socket_;
  Clock::time_point done_at_;  // once it is done
  std::atomic<bool> done_{false};
  std::thread thread_;
};

absl::StatusOr<UniqueFd> StopSignals(bool with_hand_over) {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  if (with_hand_over) ::sigaddset(&signals, SIGHUP);
  UniqueFd fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus(errno, "signalfd");
  return fd;
}

class Server {
 public:
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options) {
    auto server = std::make_unique<Server>(options);
    const std::shared_ptr<DescriptorHolder> holder = options.engine.holder;
    ASSIGN_OR_RETURN(server->engine_, Engine::Open(options.engine));
    ASSIGN_OR_RETURN(server->signals_, StopSignals(holder != nullptr));
    ASSIGN_OR_RETURN(server->mountinfo_, OpenFile("/proc/self/mountinfo", O_RDONLY));
    server->wake_.Reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!server->wake_.valid()) return ErrnoStatus(errno, "eventfd");
    std::vector<UniqueFd>& listeners = server->listeners_;
    if (holder != nullptr) listeners = holder->TakeAll("control");
    server->owns_socket_ = listeners.empty();
    if (server->owns_socket_) {
      ASSIGN_OR_RETURN(UniqueFd socket, ListenUnix(options.engine.state, kControlSocket));
      listeners.push_back(std::move(socket));
    }
    if (options.start_services) {
      ASSIGN_OR_RETURN(server->services_, options.start_services(*server->engine_));
    }
    return server;
  }
  explicit Server(const ServerOptions& options)
      : options_(options), leave_mounts_(options.engine.holder != nullptr) {}

  // Clients in the queue that were not accepted see their connection close unanswered, and start an
  // engine of their own. Those that were answered see it close when this process has ended.
  ~Server() {
    if (owns_socket_) ::unlink((options_.engine.state + "/" + kControlSocket).c_str());
    listeners_.clear();
    // Not before a hand-over: mounts that stay would give their readers errors.
    if (engine_ != nullptr && !leave_mounts_) engine_->StopRequests();
    services_.reset();
    for (Connection& connection : connections_) {
      if (connection.done()) connection.LeaveOpen();
    }
    connections_.clear();
    if (engine_ != nullptr && leave_mounts_) engine_->HandOver();
  }

  absl::Status Run() {
    while (!ShouldEnd()) {
      std::vector<pollfd> events = {
          {.fd = signals_.get(), .events = POLLIN},
          {.fd = mountinfo_.get(), .events = POLLPRI},  // proc(5): a mount came or went
          {.fd = wake_.get(), .events = POLLIN},
      };
      const size_t first_listener = events.size();
      for (const UniqueFd& listener : listeners_) {
        events.push_back({.fd = listener.get(), .events = POLLIN});
      }
      const int ready = ::poll(events.data(), events.size(), Patience());
      if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "poll");
      if (ready == 0 && options_.end_when_idle && !served_)
        return absl::OkStatus();  // whoever started us is gone
      if (ready == 0) engine_->ForgetGoneMounts();
      if (ready <= 0) continue;
      if (events[0].revents != 0) {
        signalfd_siginfo signal{};
        const ssize_t got = ::read(signals_.get(), &signal, sizeof(signal));
        if (got == sizeof(signal) && signal.ssi_signo != SIGHUP) leave_mounts_ = false;
        return absl::OkStatus();
      }
      if (events[1].revents != 0) engine_->ForgetGoneMounts();
      if (events[2].revents != 0) Drain(wake_.get());
      for (size_t i = first_listener; i < events.size(); ++i) {
        if (events[i].revents != 0) Accept(events[i].fd);
      }
    }
    return absl::OkStatus();
  }

 private:
  // Answered connections are kept while the engine may be about to end, so that their clients can
  // wait for that.
  bool ShouldEnd() {
    if (!options_.end_when_idle || engine_->HasMounts()) {
      connections_.remove_if([](const Connection& connection) { return connection.done(); });
      return false;
    }
    if (!served_ || !engine_->Idle()) {
      connections_.remove_if(
          [](const Connection& connection) { return connection.done_since(kEndGrace); });
      return false;
    }
    return std::all_of(connections_.begin(), connections_.end(),
                       [](const Connection& connection) { return connection.done(); });
  }

  // Milliseconds to wait for an event, as poll(2) takes them.
  int Patience() {
    if (!options_.end_when_idle) {
      return engine_->HasDetachedMounts() ? kDetachedPollMilliseconds : -1;
    }
    if (!served_) return kFirstRequestMilliseconds;
    return engine_->HasMounts() ? -1 : kIdlePollMilliseconds;
  }

  void Accept(int listener) {
    absl::StatusOr<UniqueFd> socket = AcceptUnix(listener);
    if (!socket.ok() && accept_failed_.ok()) {
      spdlog::error("control socket: {}", std::string(socket.status().message()));
    }
    accept_failed_ = socket.status();
    if (!socket.ok() || !socket->valid()) return;
    served_ = true;
    Connection& connection = connections_.emplace_back(*std::move(socket));
    absl::Status started = connection.Start(*engine_, options_, wake_.get());
    if (!started.ok()) {
      if (start_failed_.ok()) {
        spdlog::error("control socket: {}", std::string(started.message()));
      }
      connections_.pop_back();
    }
    start_failed_ = std::move(started);
  }

  static void Drain(int fd) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(fd, &count, sizeof(count));
  }

  const ServerOptions options_;
  std::unique_ptr<Engine> engine_;
  UniqueFd signals_;
  UniqueFd mountinfo_;
  UniqueFd wake_;
  std::vector<UniqueFd> listeners_;
  bool owns_socket_ = false;
  std::shared_ptr<void> services_;
  bool leave_mounts_;  // for the next engine
  std::list<Connection> connections_;
  bool served_ = false;
  absl::Status accept_failed_;  // these as long as they last
  absl::Status start_failed_;
};

}  // namespace

absl::Status RunServer(const ServerOptions& options) {
  // One heap for all threads. What a thread has freed serves the others then (a third less memory for
  // an engine that has merged 20 layers), and glibc lets other heaps grow by a page for each call of the
  // kernel.
  ::mallopt(M_ARENA_MAX, 1);
  ASSIGN_OR_RETURN(const std::unique_ptr<Server> server, Server::Start(options));
  if (options.ready) options.ready();
  return server->Run();
}

}  // namespace lamina::fs
