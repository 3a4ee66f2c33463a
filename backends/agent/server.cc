// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>
#include <thread>

#include "backends/agent/frame.h"
#include "backends/agent/tree.h"

namespace lamina::agent {
namespace {

using std::chrono::milliseconds;

constexpr int kMaxConnections = 512;
constexpr int64_t kLongestWait = 60'000;

// Says why a connection ends.
void Refuse(int connection, const absl::Status& why) {
  WriteFrame(connection, FrameType::kError, Encode(why)).IgnoreError();
}

absl::StatusOr<UniqueFd> OpenNull() {
  constexpr const char* kNull = "/dev/null";
  // O_NONBLOCK: a FIFO would wait for who writes.
  ASSIGN_OR_RETURN(UniqueFd null, OpenFile(kNull, O_RDONLY | O_NONBLOCK));
  struct stat info {};
  if (::fstat(null.get(), &info) != 0) return ErrnoStatus(errno, "look at /dev/null");
  if (!S_ISCHR(info.st_mode) || info.st_rdev != ::makedev(1, 3)) {
    return absl::FailedPreconditionError("/dev/null is something else");
  }
  // What is opened here is what programs get.
  if (::fcntl(null.get(), F_SETFL, 0) != 0) return ErrnoStatus(errno, "open /dev/null");
  return null;
}

milliseconds Since(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - time);
}

}  // namespace

Server::Server(UniqueFd listener, Runner& runner, ServerOptions options)
    : listener_(std::move(listener)), runner_(runner), options_(options), null_(OpenNull()) {}

milliseconds Server::IdleFor() {
  const std::lock_guard lock(mutex_);
  return in_use_ > 0 ? milliseconds(0) : Since(last_used_);
}

void Server::CountUse(int change) {
  const std::lock_guard lock(mutex_);
  in_use_ += change;
  last_used_ = Clock::now();
}

absl::Status Server::Serve() {
  while (true) {
    int64_t wait = kLongestWait;
    if (options_.ttl.count() > 0) {
      wait = std::min<int64_t>(wait, (options_.ttl - Since(start_)).count());
    }
    if (options_.idle_ttl.count() > 0) {
      wait = std::min<int64_t>(wait, (options_.idle_ttl - IdleFor()).count());
    }
    if (wait <= 0) return absl::OkStatus();
    pollfd waits{.fd = listener_.get(), .events = POLLIN};
    const int ready = ::poll(&waits, 1, static_cast<int>(wait));
    if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "poll");
    if (ready <= 0) continue;
    UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        ::poll(nullptr, 0, 50);  // it stays in the queue
        continue;
      }
      if (errno == EINTR || errno == ECONNABORTED || errno == EAGAIN) continue;
      return ErrnoStatus(errno, "accept");
    }
    if (AllowPeer(connection.get())) Take(std::move(connection));
  }
}

void Server::Take(UniqueFd connection) {
  if (connections_ >= kMaxConnections) {
    Refuse(connection.get(), absl::ResourceExhaustedError(fmt::format(
                                 "the sandbox serves {} requests already", kMaxConnections)));
    return;
  }
  ++connections_;
  try {
    std::thread([this, fd = connection.get()] { Handle(fd); }).detach();
    connection.Release();
  } catch (const std::system_error& error) {
    --connections_;
    Refuse(connection.get(),
           absl::ResourceExhaustedError(
               fmt::format("the sandbox has no room for a thread: {}", error.code().message())));
  }
}

bool Server::AllowPeer(int connection) const {
  if (!options_.only_outside_peers) return true;
  ucred peer{};
  socklen_t size = sizeof(peer);
  // 0: it has no number in this PID namespace (Linux, net/core/sock.c, cred_to_ucred).
  return ::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid == 0;
}

void Server::Handle(int connection) {
  const UniqueFd owned(connection);
  if (const absl::Status done = Answer(connection); !done.ok()) {
    Refuse(connection, done);
    // Closing with unread bytes would drop what was just written.
    ::shutdown(connection, SHUT_WR);
  }
  --connections_;
}

absl::Status Server::Answer(int connection) {
  ASSIGN_OR_RETURN(const Frame frame, ReadFrame(connection));
  switch (frame.type) {
    case FrameType::kExec:
    case FrameType::kPutTree:
    case FrameType::kGetTree: {
      // Until the last byte has gone, however slowly the other side takes it.
      CountUse(1);
      absl::Status done = Work(connection, frame);
      CountUse(-1);
      return done;
    }
    case FrameType::kInfo:
      return Info(connection);
    case FrameType::kCloseSession:
      RETURN_IF_ERROR(sessions_.Close(frame.content));
      return WriteFrame(connection, FrameType::kDone, "");
    default:
      return absl::InvalidArgumentError(
          fmt::format("frame {} is no request", static_cast<int>(frame.type)));
  }
}

absl::Status Server::Work(int connection, const Frame& request) {
  if (request.type == FrameType::kPutTree) return PutTree(connection, request.content);
  if (request.type == FrameType::kGetTree) return GetTree(connection, request.content);
  ASSIGN_OR_RETURN(ExecMessage message, DecodeExec(request.content));
  RETURN_IF_ERROR(null_.status());
  ExecConnection exec(connection, runner_, null_->get());
  // Who hears that a program has ended finds nothing of it any more: not its session busy, nor itself
  // among those that run.
  ASSIGN_OR_RETURN(const EndedMessage ended, Execute(exec, std::move(message)));
  return exec.Finish(ended);
}

absl::StatusOr<EndedMessage> Server::Execute(ExecConnection& exec, ExecMessage message) {
  {
    const std::lock_guard lock(mutex_);
    ++running_;
  }
  absl::StatusOr<EndedMessage> ended = ExecuteInSession(exec, std::move(message));
  const std::lock_guard lock(mutex_);
  --running_;
  return ended;
}

absl::StatusOr<EndedMessage> Server::ExecuteInSession(ExecConnection& exec, ExecMessage message) {
  const std::string session = message.session;
  std::string state;
  if (session.empty()) return exec.Serve(message, /*with_state=*/false, state);
  if (!options_.sessions) {
    return absl::UnimplementedError("calls have no sessions: each starts clean");
  }
  ASSIGN_OR_RETURN(message, sessions_.Begin(std::move(message)));
  absl::StatusOr<EndedMessage> ended = exec.Serve(message, /*with_state=*/true, state);
  const absl::Status kept = sessions_.End(session, std::move(state));
  if (ended.ok() && !kept.ok() && ended->detail.empty())
    ended->detail = std::string(kept.message());
  return ended;
}

absl::Status Server::PutTree(int connection, std::string_view content) {
  if (!options_.files) return absl::UnimplementedError("calls have files of their own only");
  ASSIGN_OR_RETURN(const TreeMessage message, DecodeTree(content));
  RETURN_IF_ERROR(ReceiveTree(connection, message.path,
                              {.max_bytes = message.limit,
                               .owner = Owner{.uid = message.uid, .gid = message.gid}})
                      .status(),
                  "put {}", message.path);
  return WriteFrame(connection, FrameType::kDone, "");
}

absl::Status Server::GetTree(int connection, std::string_view content) {
  if (!options_.files) return absl::UnimplementedError("calls have files of their own only");
  ASSIGN_OR_RETURN(const TreeMessage message, DecodeTree(content));
  return Annotate(SendTree(connection, message.path).status(), fmt::format("get {}", message.path));
}

absl::Status Server::Info(int connection) {
  InfoMessage info{.uptime_ms = static_cast<uint64_t>(Since(start_).count()),
                   .idle_ms = static_cast<uint64_t>(IdleFor().count()),
                   .sessions = sessions_.Names()};
  {
    const std::lock_guard lock(mutex_);
    info.running = static_cast<uint64_t>(running_);
  }
  return WriteFrame(connection, FrameType::kInfoReply, Encode(info));
}

}  // namespace lamina::agent
