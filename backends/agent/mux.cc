// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/mux.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>

#include "backends/agent/frame.h"

namespace lamina::agent {
namespace {

// More is read from connections while less than this waits for the stream.
constexpr size_t kMaxOut = 2 * Mux::kPiece;
// The sender hears of room that has come once it is this much.
constexpr size_t kCreditStep = Mux::kWindow / 4;

void PutNumber(std::string& bytes, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
}

uint32_t GetNumber(std::string_view bytes) {
  uint32_t value = 0;
  for (size_t byte = 0; byte < 4; ++byte) {
    value |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[byte])) << (8 * byte);
  }
  return value;
}

bool SetNonBlocking(int fd) { return ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK) == 0; }

bool WouldBlock() { return errno == EAGAIN || errno == EINTR; }

}  // namespace

absl::StatusOr<std::unique_ptr<Mux>> Mux::Create(Side side, UniqueFd stream, Events events) {
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid() || !SetNonBlocking(stream.get())) return ErrnoStatus(errno, "agent's stream");
  std::unique_ptr<Mux> mux(new Mux(side, std::move(stream), std::move(wake), std::move(events)));
  if (side == Side::kHost) mux->AppendClock(FrameType::kGreeting);
  return mux;
}

void Mux::Wake() {
  const uint64_t one = 1;
  std::ignore = ::write(wake_.get(), &one, sizeof(one));
}

void Mux::Stop() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  Wake();
}

void Mux::Open(UniqueFd connection) {
  {
    const std::lock_guard lock(mutex_);
    to_open_.push_back(std::move(connection));
  }
  Wake();
}

absl::Status Mux::Quiesce(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  quiescing_ = Quiet::kAsked;
  Wake();
  if (quiet_.wait_for(lock, patience, [&] { return quiescing_ == Quiet::kYes || end_; }) && !end_) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError("the agent does not get quiet");
}

void Mux::Continue() {
  {
    const std::lock_guard lock(mutex_);
    quiescing_ = Quiet::kOver;
  }
  Wake();
}

void Mux::Append(uint32_t connection, FrameType type, std::string_view content) {
  PutNumber(out_, connection);
  out_.push_back(static_cast<char>(type));
  PutNumber(out_, static_cast<uint32_t>(content.size()));
  out_.append(content);
}

void Mux::AppendClock(FrameType type) {
  const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  Append(0, type, FieldWriter().Number(static_cast<uint64_t>(now.count())).Take());
}

// What other threads have asked for.
void Mux::TakeOrders() {
  uint64_t ignored = 0;
  std::ignore = ::read(wake_.get(), &ignored, sizeof(ignored));
  const std::lock_guard lock(mutex_);
  if (quiescing_ == Quiet::kAsked) {
    Append(0, FrameType::kQuiesce);
    stopped_ = true;
    quiescing_ = Quiet::kSent;
  } else if (quiescing_ == Quiet::kOver) {
    // Also to a guest that was never asked, or has not answered: it may have been stopped for long.
    AppendClock(FrameType::kContinue);
    stopped_ = false;
    quiescing_ = Quiet::kNo;
    for (auto& [id, connection] : connections_) GiveCredit(id, connection);
  }
  if (stopped_) return;
  for (UniqueFd& socket : to_open_) {
    if (connections_.size() >= kMaxConnections || !SetNonBlocking(socket.get())) continue;
    Append(next_id_, FrameType::kOpen);
    connections_[next_id_++].socket = std::move(socket);
  }
  to_open_.clear();
}

absl::Status Mux::Run() {
  while (true) {
    TakeOrders();
    {
      const std::lock_guard lock(mutex_);
      if (end_) return absl::OkStatus();
    }
    std::vector<pollfd> waits{
        {stream_.get(), static_cast<short>(POLLIN | (out_.empty() ? 0 : POLLOUT))},
        {wake_.get(), POLLIN}};
    std::vector<uint32_t> ids;
    const bool room = !stopped_ && out_.size() < kMaxOut;
    for (const auto& [id, connection] : connections_) {
      short events = 0;
      if (room && !connection.socket_ended && connection.credit > 0) events |= POLLIN;
      if (!connection.incoming.empty()) events |= POLLOUT;
      // The host looks for clients that go; an agent's last words are read when there is room.
      const bool watched = events != 0 || (side_ == Side::kHost && !stopped_);
      waits.push_back({watched ? connection.socket.get() : -1, events});
      ids.push_back(id);
    }
    if (::poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) {
      return ErrnoStatus(errno, "poll");
    }
    absl::Status status;
    if ((waits[0].revents & POLLOUT) != 0) status = WriteStream();
    if (status.ok() && (waits[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0)
      status = ReadStream();
    if (!status.ok()) {
      const std::lock_guard lock(mutex_);
      end_ = true;
      quiet_.notify_all();
      return status;
    }
    std::map<uint32_t, short> ready;
    for (size_t index = 0; index < ids.size(); ++index) {
      if (waits[index + 2].revents != 0) ready[ids[index]] = waits[index + 2].revents;
    }
    ServeConnections(ready);
    if (!out_.empty()) RETURN_IF_ERROR(WriteStream());
  }
}

absl::Status Mux::WriteStream() {
  while (!out_.empty()) {
    const ssize_t written = ::write(stream_.get(), out_.data(), out_.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) return absl::OkStatus();
    if (written < 0) return absl::UnavailableError("the other end of the agent's stream is gone");
    out_.erase(0, static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status Mux::ReadStream() {
  std::array<char, kPiece> piece;
  const ssize_t got = ::read(stream_.get(), piece.data(), piece.size());
  if (got < 0 && WouldBlock()) return absl::OkStatus();
  if (got <= 0) return absl::UnavailableError("the other end of the agent's stream is gone");
  in_.append(piece.data(), static_cast<size_t>(got));
  std::string_view rest = in_;
  while (rest.size() >= kHeader) {
    const uint32_t id = GetNumber(rest);
    const auto type = static_cast<FrameType>(static_cast<unsigned char>(rest[4]));
    const uint32_t length = GetNumber(rest.substr(5));
    if (length > kPiece) {
      return absl::DataLossError(fmt::format("agent's stream: a frame of {} bytes", length));
    }
    if (rest.size() < kHeader + length) break;
    RETURN_IF_ERROR(TakeFrame(id, type, rest.substr(kHeader, length)), "agent's stream");
    rest.remove_prefix(kHeader + length);
  }
  in_.erase(0, in_.size() - rest.size());
  return absl::OkStatus();
}

absl::Status Mux::TakeFrame(uint32_t id, FrameType type, std::string_view content) {
  const bool is_guest = side_ == Side::kGuest;
  const auto not_allowed = [type] {
    return absl::DataLossError(fmt::format("frame {} is not allowed", static_cast<int>(type)));
  };
  if (id != 0) return TakeConnectionFrame(id, type, content);
  switch (type) {
    case FrameType::kGreeting:
    case FrameType::kContinue: {
      if (!is_guest) {
        if (type != FrameType::kGreeting || !content.empty()) return not_allowed();
        if (events_.greeted) events_.greeted();
        return absl::OkStatus();
      }
      FieldReader reader(content);
      const uint64_t now = reader.Number();
      RETURN_IF_ERROR(reader.Finish("clock"));
      if (events_.clock) events_.clock(std::chrono::microseconds(now));
      stopped_ = false;
      if (type == FrameType::kGreeting) {
        connections_.clear();
        Append(0, FrameType::kGreeting);
      } else {
        for (auto& [other, connection] : connections_) GiveCredit(other, connection);
      }
      return absl::OkStatus();
    }
    case FrameType::kQuiesce:
      if (!is_guest) return not_allowed();
      Append(0, FrameType::kQuiet);
      stopped_ = true;
      return absl::OkStatus();
    case FrameType::kQuiet: {
      if (is_guest) return not_allowed();
      const std::lock_guard lock(mutex_);
      if (quiescing_ == Quiet::kSent) quiescing_ = Quiet::kYes;
      quiet_.notify_all();
      return absl::OkStatus();
    }
    default:
      return not_allowed();
  }
}

absl::Status Mux::TakeConnectionFrame(uint32_t id, FrameType type, std::string_view content) {
  if (type == FrameType::kOpen) {
    if (side_ != Side::kGuest) return absl::DataLossError("the guest opens a connection");
    if (connections_.contains(id)) return absl::DataLossError("a connection is opened twice");
    std::array<int, 2> ends{};
    if (connections_.size() >= kMaxConnections ||
        ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
      Append(id, FrameType::kClose);
      return absl::OkStatus();
    }
    UniqueFd other(ends[1]);
    SetNonBlocking(ends[0]);
    connections_[id].socket.Reset(ends[0]);
    events_.opened(std::move(other));
    return absl::OkStatus();
  }
  const auto found = connections_.find(id);
  if (found == connections_.end()) {
    // Sent before the sender heard that it is closed.
    if (side_ == Side::kGuest || id < next_id_) return absl::OkStatus();
    return absl::DataLossError(fmt::format("there is no connection {}", id));
  }
  Connection& connection = found->second;
  switch (type) {
    case FrameType::kData:
      if (connection.other_ended || content.size() > kWindow - connection.incoming.size()) {
        return absl::DataLossError(fmt::format("more than is allowed on connection {}", id));
      }
      if (connection.deaf) {
        connection.consumed += content.size();
      } else {
        connection.incoming.append(content);
      }
      return absl::OkStatus();
    case FrameType::kCredit: {
      if (content.size() != 4) return absl::DataLossError("a credit without a size");
      const uint32_t credit = GetNumber(content);
      if (credit > kWindow - connection.credit) return absl::DataLossError("too much credit");
      connection.credit += credit;
      return absl::OkStatus();
    }
    case FrameType::kEnd:
      connection.other_ended = true;
      return absl::OkStatus();
    case FrameType::kClose:
      connections_.erase(found);
      return absl::OkStatus();
    default:
      return absl::DataLossError(fmt::format("frame {} is unknown", static_cast<int>(type)));
  }
}

bool Mux::WriteSocket(Connection& connection) {
  while (!connection.incoming.empty()) {
    const ssize_t sent = ::send(connection.socket.get(), connection.incoming.data(),
                                connection.incoming.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return true;
    if (sent < 0) {
      // Who called has gone; an agent that refuses does not listen, and says why.
      if (side_ == Side::kHost) return false;
      connection.consumed += connection.incoming.size();
      connection.incoming.clear();
      connection.deaf = true;
      break;
    }
    connection.incoming.erase(0, static_cast<size_t>(sent));
    connection.consumed += static_cast<size_t>(sent);
  }
  if (connection.other_ended) ::shutdown(connection.socket.get(), SHUT_WR);
  return true;
}

void Mux::GiveCredit(uint32_t id, Connection& connection) {
  if (stopped_ || connection.consumed < kCreditStep || connection.other_ended) return;
  std::string credit;
  PutNumber(credit, static_cast<uint32_t>(std::exchange(connection.consumed, 0)));
  Append(id, FrameType::kCredit, credit);
}

void Mux::ReadSocket(uint32_t id, Connection& connection) {
  std::array<char, kPiece> piece;
  const ssize_t got =
      ::recv(connection.socket.get(), piece.data(), std::min(piece.size(), connection.credit), 0);
  if (got < 0 && WouldBlock()) return;
  if (got <= 0) {
    connection.socket_ended = true;
    Append(id, FrameType::kEnd);
    return;
  }
  connection.credit -= static_cast<size_t>(got);
  Append(id, FrameType::kData, {piece.data(), static_cast<size_t>(got)});
}

void Mux::ServeConnections(const std::map<uint32_t, short>& ready) {
  for (auto it = connections_.begin(); it != connections_.end();) {
    auto& [id, connection] = *it;
    const auto found = ready.find(id);
    const short events = found == ready.end() ? short{0} : found->second;
    // Whoever has closed a connection on the host wants nothing more of it, and what runs for it ends.
    const bool gone = side_ == Side::kHost && (events & (POLLHUP | POLLERR)) != 0;
    const bool done = !gone && WriteSocket(connection);
    if (!done) {
      // While the stream must stay empty the other end hears of it later, when it is found again. Until
      // then the socket is not looked at: it would be ready all the time.
      if (stopped_) {
        connection.incoming.clear();
        ++it;
        continue;
      }
      Append(id, FrameType::kClose);
      it = connections_.erase(it);
      continue;
    }
    GiveCredit(id, connection);
    const bool heard = connection.deaf || (connection.other_ended && connection.incoming.empty());
    if (heard && connection.socket_ended) {
      it = connections_.erase(it);
      continue;
    }
    ++it;
  }
  // One piece of each, beginning behind the last one that had its turn.
  std::vector<uint32_t> turns;
  for (const auto& [id, events] : ready) {
    if ((events & (POLLIN | POLLHUP)) != 0) turns.push_back(id);
  }
  std::rotate(turns.begin(), std::ranges::upper_bound(turns, last_read_), turns.end());
  for (const uint32_t id : turns) {
    const auto found = connections_.find(id);
    if (stopped_ || out_.size() >= kMaxOut || found == connections_.end()) continue;
    if (found->second.socket_ended || found->second.credit == 0) continue;
    ReadSocket(id, found->second);
    last_read_ = id;
  }
}

}  // namespace lamina::agent
