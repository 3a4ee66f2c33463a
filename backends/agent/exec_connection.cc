// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/exec_connection.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "backends/agent/frame.h"
#include "backends/agent/sessions.h"

namespace lamina::agent {
namespace {

// Output is read from the process while the other side has not more than this to take.
constexpr size_t kMaxWaiting = 512 << 10;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

absl::StatusOr<Pipe> MakePipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  return Pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// Only this process' end: the other one is used by programs that expect to wait.
void MakeNonBlocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

absl::StatusOr<Streams> ExecConnection::MakePipes(const ExecMessage& message, bool with_state) {
  Streams streams;
  if (message.has_stdin) {
    ASSIGN_OR_RETURN(Pipe pipe, MakePipe());
    streams.in = std::move(pipe.read);
    stdin_ = std::move(pipe.write);
    MakeNonBlocking(stdin_.get());
  } else {
    streams.in.Reset(::fcntl(null_, F_DUPFD_CLOEXEC, 0));
    if (!streams.in.valid()) return ErrnoStatus(errno, "dup");
  }
  const auto reading_end = [](UniqueFd& ours, UniqueFd& theirs) -> absl::Status {
    ASSIGN_OR_RETURN(Pipe pipe, MakePipe());
    ours = std::move(pipe.read);
    theirs = std::move(pipe.write);
    MakeNonBlocking(ours.get());
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(reading_end(stdout_, streams.out));
  RETURN_IF_ERROR(reading_end(stderr_, streams.err));
  if (with_state) RETURN_IF_ERROR(reading_end(state_, streams.state));
  return streams;
}

absl::StatusOr<EndedMessage> ExecConnection::Serve(const ExecMessage& message, bool with_state,
                                                   std::string& state) {
  ASSIGN_OR_RETURN(Streams streams, MakePipes(message, with_state));
  state_bytes_ = &state;
  output_limit_ = message.output_limit;
  ASSIGN_OR_RETURN(run_, runner_.Start(message, std::move(streams)));
  if (message.timeout_ms > 0) {
    constexpr uint64_t kLongest = uint64_t{1000} * 3600 * 24 * 365;
    deadline_ = Clock::now() + std::chrono::milliseconds(std::min(message.timeout_ms, kLongest));
  }
  const auto pid = static_cast<uint64_t>(run_->pid());
  stream_.Append(FrameType::kStarted, FieldWriter().Number(pid).Take());
  RETURN_IF_ERROR(Loop());

  // What it wrote before it ended; others may hold the pipes open.
  for (UniqueFd* pipe : {&stdout_, &stderr_, &state_}) {
    const std::optional<FrameType> stream =
        pipe == &state_ ? std::nullopt
                        : std::optional(pipe == &stdout_ ? FrameType::kStdout : FrameType::kStderr);
    // One pipe's content at the most: a process that is still there may write for ever.
    for (int piece = 0; pipe->valid() && piece < 16; ++piece) TakeOutput(*pipe, stream);
  }
  ASSIGN_OR_RETURN(EndedMessage ended, run_->Result());
  if (killed_for_.has_value()) {
    ended.ending = *killed_for_;
    ended.code = SIGKILL;
  }
  ended.output_bytes = output_bytes_;
  return ended;
}

absl::Status ExecConnection::Finish(const EndedMessage& ended) {
  stream_.Append(FrameType::kEnded, Encode(ended));
  while (stream_.unsent() > 0) {
    pollfd waits{.fd = socket_, .events = POLLOUT};
    if (::poll(&waits, 1, -1) < 0 && errno != EINTR) return ErrnoStatus(errno, "poll");
    RETURN_IF_ERROR(stream_.Send());
  }
  return absl::OkStatus();
}

void ExecConnection::KillFor(Ending reason) {
  if (killed_for_.has_value()) return;
  killed_for_ = reason;
  deadline_.reset();
  run_->Kill();
}

int ExecConnection::PollTimeout() const {
  if (!deadline_.has_value()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now());
  constexpr int64_t kLongest = 3600 * 1000;
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, kLongest));
}

absl::Status ExecConnection::Loop() {
  while (true) {
    const bool room = stream_.unsent() < kMaxWaiting;
    const bool feeds = stdin_.valid() && !stdin_bytes_.empty();
    const auto fd_if = [](bool wanted, const UniqueFd& fd) { return wanted ? fd.get() : -1; };
    std::array<pollfd, 6> waits{
        pollfd{socket_,
               static_cast<short>(POLLRDHUP | POLLIN | (stream_.unsent() > 0 ? POLLOUT : 0))},
        pollfd{run_->ended(), POLLIN},
        pollfd{fd_if(room, stdout_), POLLIN},
        pollfd{fd_if(room, stderr_), POLLIN},
        pollfd{fd_if(true, state_), POLLIN},
        pollfd{fd_if(feeds, stdin_), POLLOUT},
    };
    if (::poll(waits.data(), waits.size(), PollTimeout()) < 0 && errno != EINTR) {
      return ErrnoStatus(errno, "poll");
    }
    // What has ended by itself was in time, however late this is looked at.
    const bool has_ended = waits[1].revents != 0;
    if (!has_ended && deadline_.has_value() && Clock::now() >= *deadline_) {
      KillFor(Ending::kTimeLimit);
    }
    if (waits[2].revents != 0) TakeOutput(stdout_, FrameType::kStdout);
    if (waits[3].revents != 0) TakeOutput(stderr_, FrameType::kStderr);
    if (waits[4].revents != 0) TakeOutput(state_, std::nullopt);
    if (waits[5].revents != 0) FeedStdin();
    if ((waits[0].revents & POLLIN) != 0) RETURN_IF_ERROR(TakeFrames());
    if ((waits[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
      return absl::UnavailableError("the other side has gone");
    }
    if ((waits[0].revents & POLLOUT) != 0) RETURN_IF_ERROR(stream_.Send());
    if (has_ended) return absl::OkStatus();
  }
}

absl::Status ExecConnection::TakeFrames() {
  RETURN_IF_ERROR(stream_.Receive());
  while (true) {
    ASSIGN_OR_RETURN(const std::optional<Frame> frame, stream_.Next());
    if (!frame.has_value()) return absl::OkStatus();
    RETURN_IF_ERROR(TakeFrame(*frame));
  }
}

absl::Status ExecConnection::TakeFrame(const Frame& frame) {
  switch (frame.type) {
    case FrameType::kStdin:
      if (stdin_bytes_.size() + frame.content.size() > kStdinWindow) {
        return absl::InvalidArgumentError("more input than the process has taken");
      }
      if (stdin_.valid() && !stdin_ends_) {
        stdin_bytes_ += frame.content;
        FeedStdin();
      }
      return absl::OkStatus();
    case FrameType::kStdinEnd:
      stdin_ends_ = true;
      FeedStdin();
      return absl::OkStatus();
    case FrameType::kSignal: {
      FieldReader reader(frame.content);
      const uint64_t signal = reader.Number();
      RETURN_IF_ERROR(reader.Finish("signal"));
      if (signal < 1 || signal > 64) return absl::InvalidArgumentError("no such signal");
      run_->Signal(static_cast<int>(signal));
      return absl::OkStatus();
    }
    default:
      return absl::InvalidArgumentError(
          fmt::format("frame {} while a process runs", static_cast<int>(frame.type)));
  }
}

void ExecConnection::FeedStdin() {
  while (stdin_.valid() && !stdin_bytes_.empty()) {
    const ssize_t written = ::write(stdin_.get(), stdin_bytes_.data(), stdin_bytes_.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) return;
    if (written < 0) {  // nobody reads it any more
      stdin_.Reset();
      stdin_bytes_.clear();
      return;
    }
    stdin_bytes_.erase(0, static_cast<size_t>(written));
    stream_.Append(FrameType::kStdinTaken,
                   FieldWriter().Number(static_cast<uint64_t>(written)).Take());
  }
  if (stdin_ends_) stdin_.Reset();
}

void ExecConnection::TakeOutput(UniqueFd& pipe, std::optional<FrameType> stream) {
  std::array<char, kPiece> piece;
  const ssize_t got = ::read(pipe.get(), piece.data(), piece.size());
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got <= 0) {
    pipe.Reset();
    return;
  }
  const std::string_view bytes(piece.data(), static_cast<size_t>(got));
  if (!stream.has_value()) {
    // One byte more than is allowed, so that it is known to be too long.
    const size_t room =
        Sessions::kMaxState + 1 - std::min(state_bytes_->size(), Sessions::kMaxState + 1);
    state_bytes_->append(bytes.substr(0, room));
    return;
  }
  output_bytes_ += bytes.size();
  if (output_limit_ > 0 && output_bytes_ > output_limit_) {
    const uint64_t over = output_bytes_ - output_limit_;
    if (over < bytes.size()) stream_.Append(*stream, bytes.substr(0, bytes.size() - over));
    KillFor(Ending::kOutputLimit);
    return;
  }
  stream_.Append(*stream, bytes);
}

}  // namespace lamina::agent
