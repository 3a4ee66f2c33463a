// SPDX-License-Identifier: Apache-2.0
#include "backends/agent_client.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "backends/agent/frame.h"
#include "backends/agent/program.h"
#include "backends/agent/tree.h"
#include "fs/engine/socket.h"

namespace lamina::backends {
namespace {

using agent::Frame;
using agent::FrameType;
using agent::ReadFrame;
using agent::WriteFrame;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{60};

absl::StatusOr<UniqueFd> Connect(const std::string& directory) {
  ASSIGN_OR_RETURN(UniqueFd socket, fs::ConnectUnix(directory, kAgentSocket, kPatience));
  RETURN_IF_ERROR(fs::SetSocketPatience(socket.get(), kPatience));
  return socket;
}

// An error of a connection, or that came over it. kUnavailable is none of these.
absl::Status OfConnection(absl::Status error) {
  if (!absl::IsUnavailable(error)) return error;
  return absl::AbortedError(error.message());
}

// What the agent says when our writing failed: the reason, if it gave one.
absl::Status WhyWriteFailed(int socket, absl::Status failed) {
  const absl::StatusOr<Frame> said = ReadFrame(socket, steady_clock::now() + kPatience);
  if (said.ok() && said->type == FrameType::kError) failed = agent::DecodeError(said->content);
  return OfConnection(std::move(failed));
}

// A connection with its request on it.
absl::StatusOr<UniqueFd> Ask(const std::string& directory, FrameType type,
                             std::string_view content) {
  ASSIGN_OR_RETURN(UniqueFd socket, Connect(directory));
  const absl::Status asked = WriteFrame(socket.get(), type, content);
  if (absl::IsUnavailable(asked)) return WhyWriteFailed(socket.get(), asked);
  RETURN_IF_ERROR(asked, "agent");
  return socket;
}

absl::Status NotExpected(const Frame& frame) {
  return absl::DataLossError(
      fmt::format("agent: frame {} was not expected", static_cast<int>(frame.type)));
}

absl::StatusOr<Frame> ReadAnswer(int socket, FrameType expected) {
  absl::StatusOr<Frame> frame = ReadFrame(socket, steady_clock::now() + kPatience);
  RETURN_IF_ERROR(OfConnection(frame.status()), "agent");
  if (frame->type == FrameType::kError) return OfConnection(agent::DecodeError(frame->content));
  if (frame->type != expected) return NotExpected(*frame);
  return frame;
}

ExecEnding ToEnding(agent::Ending ending) {
  switch (ending) {
    case agent::Ending::kExited:
      return ExecEnding::kExited;
    case agent::Ending::kSignalled:
      return ExecEnding::kSignalled;
    case agent::Ending::kTimeLimit:
      return ExecEnding::kTimeLimit;
    case agent::Ending::kMemoryLimit:
      return ExecEnding::kMemoryLimit;
    case agent::Ending::kOutputLimit:
      return ExecEnding::kOutputLimit;
    case agent::Ending::kForbiddenCall:
      return ExecEnding::kForbiddenCall;
    case agent::Ending::kCannotStart:
      return ExecEnding::kCannotStart;
  }
  return ExecEnding::kSandboxDied;
}

// One exec on its connection.
class Execution {
 public:
  Execution(int socket, const ExecRequest& request, const ExecPatience& patience)
      : socket_(socket),
        request_(request),
        patience_(patience),
        stream_(socket),
        stdin_text_(request.stdin_text),
        stdin_open_(request.stdin_fd >= 0 || !stdin_text_.empty()) {}

  absl::StatusOr<ExecResult> Run() {
    if (!patience_.from_start) SetDeadline();
    while (true) {
      if (deadline_.has_value() && steady_clock::now() >= *deadline_) {
        EndFor(ExecEnding::kTimeLimit, "its agent did not end it in time");
        return std::move(result_);
      }
      if (request_.stdin_fd < 0) SendText();
      std::array<pollfd, 3> waits{
          pollfd{socket_, static_cast<short>(POLLIN | (stream_.unsent() > 0 ? POLLOUT : 0))},
          pollfd{stdin_open_ && StdinRoom() > 0 ? request_.stdin_fd : -1, POLLIN},
          pollfd{request_.signal_fd, POLLIN},
      };
      if (::poll(waits.data(), waits.size(), PollTimeout()) < 0) {
        if (errno == EINTR) continue;
        return ErrnoStatus(errno, "poll");
      }
      // What we send may fail because the agent has ended; what it said before is still there.
      if (waits[2].revents != 0) SendSignal();
      if (waits[1].revents != 0) SendFromDescriptor();
      if ((waits[0].revents & POLLOUT) != 0 && !stream_.Send().ok()) stdin_open_ = false;
      if ((waits[0].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
      ASSIGN_OR_RETURN(const bool ended, TakeFrames());
      if (ended) return std::move(result_);
    }
  }

 private:
  void SetDeadline() {
    constexpr milliseconds kLongest = std::chrono::hours(24 * 365);
    if (request_.timeout.count() > 0) {
      deadline_ = steady_clock::now() + std::min(request_.timeout, kLongest) + patience_.grace;
    }
  }
  int PollTimeout() const {
    if (!deadline_.has_value()) return -1;
    constexpr int64_t kLongest = 3600 * 1000;
    const auto left = std::chrono::ceil<milliseconds>(*deadline_ - steady_clock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 0, kLongest));
  }
  // The agent did not say this.
  void EndFor(ExecEnding ending, std::string_view detail) {
    result_.ending = ending;
    result_.signal = SIGKILL;
    result_.wall_time =
        std::chrono::duration_cast<std::chrono::microseconds>(steady_clock::now() - start_);
    result_.output_bytes = seen_bytes_;
    result_.detail = detail;
  }
  void Send(FrameType type, std::string_view content) {
    stream_.Append(type, content);
    if (!stream_.Send().ok()) stdin_open_ = false;
  }
  // How much input the agent takes now.
  size_t StdinRoom() const { return agent::kStdinWindow - stdin_waiting_; }
  void SendStdin(std::string_view piece) {
    stdin_waiting_ += piece.size();
    Send(FrameType::kStdin, piece);
  }
  void SendSignal() {
    const int signal = request_.next_signal ? request_.next_signal() : 0;
    if (signal > 0) {
      Send(FrameType::kSignal, agent::FieldWriter().Number(static_cast<uint64_t>(signal)).Take());
    }
  }
  void SendText() {
    while (stdin_open_ && StdinRoom() > 0) {
      const std::string_view piece = stdin_text_.substr(0, std::min(agent::kPiece, StdinRoom()));
      SendStdin(piece);
      stdin_text_.remove_prefix(piece.size());
      if (stdin_text_.empty()) EndStdin();
    }
  }
  void SendFromDescriptor() {
    std::array<char, agent::kPiece> piece;
    const ssize_t got =
        ::read(request_.stdin_fd, piece.data(), std::min(piece.size(), StdinRoom()));
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (got <= 0) return EndStdin();
    SendStdin({piece.data(), static_cast<size_t>(got)});
  }
  void EndStdin() {
    if (stdin_open_) Send(FrameType::kStdinEnd, "");
    stdin_open_ = false;
  }

  void Keep(Stream stream, std::string_view bytes) {
    if (request_.on_output) request_.on_output(stream, bytes);
    std::string& kept =
        stream == Stream::kStdout ? result_.standard_output : result_.standard_error;
    const uint64_t room =
        request_.kept_output - std::min<uint64_t>(request_.kept_output, kept.size());
    kept.append(bytes.substr(0, room));
    seen_bytes_ += bytes.size();
  }

  // True if that was the end.
  absl::StatusOr<bool> TakeFrames() {
    const absl::Status received = stream_.Receive();
    if (absl::IsUnavailable(received)) {
      EndFor(ExecEnding::kSandboxDied, "the sandbox ended while the program ran");
      return true;
    }
    RETURN_IF_ERROR(received, "agent");
    while (true) {
      ASSIGN_OR_RETURN(const std::optional<Frame> frame, stream_.Next(), "agent");
      if (!frame.has_value()) return false;
      if (frame->type == FrameType::kEnded) {
        RETURN_IF_ERROR(TakeEnd(frame->content));
        return true;
      }
      RETURN_IF_ERROR(TakeFrame(*frame));
      // An agent sends no more than that, and says that it was too much.
      if (request_.output_limit > 0 && seen_bytes_ > request_.output_limit) {
        EndFor(ExecEnding::kOutputLimit, "its agent did not end it for its output");
        return true;
      }
    }
  }

  absl::Status TakeFrame(const Frame& frame) {
    switch (frame.type) {
      case FrameType::kStarted:
        if (patience_.from_start && !deadline_.has_value()) SetDeadline();
        return absl::OkStatus();
      case FrameType::kStdout:
        Keep(Stream::kStdout, frame.content);
        return absl::OkStatus();
      case FrameType::kStderr:
        Keep(Stream::kStderr, frame.content);
        return absl::OkStatus();
      case FrameType::kStdinTaken: {
        agent::FieldReader reader(frame.content);
        const uint64_t taken = reader.Number();
        RETURN_IF_ERROR(reader.Finish("agent: input that was taken"));
        if (taken > stdin_waiting_) {
          return absl::DataLossError("agent: more input was taken than there was");
        }
        stdin_waiting_ -= taken;
        return absl::OkStatus();
      }
      case FrameType::kError:
        return OfConnection(agent::DecodeError(frame.content));
      default:
        return NotExpected(frame);
    }
  }

  absl::Status TakeEnd(std::string_view content) {
    ASSIGN_OR_RETURN(agent::EndedMessage ended, agent::DecodeEnded(content), "agent");
    if (ended.files_out.size() > request_.files_out.size()) {
      return absl::DataLossError("agent: more files came back than were asked for");
    }
    result_.ending = ToEnding(ended.ending);
    if (result_.ending == ExecEnding::kExited) {
      result_.exit_code = ended.code;
    } else if (result_.ending == ExecEnding::kCannotStart) {
      result_.exit_code = agent::ExitCodeFor(ended.code);
    } else {
      result_.signal = ended.code;
    }
    result_.wall_time = std::chrono::microseconds(ended.wall_us);
    result_.cpu_time = std::chrono::microseconds(ended.cpu_us);
    result_.peak_memory = ended.peak_bytes;
    result_.output_bytes = ended.output_bytes;
    result_.detail = std::move(ended.detail);
    result_.files_out = std::move(ended.files_out);
    return absl::OkStatus();
  }

  const int socket_;
  const ExecRequest& request_;
  const ExecPatience& patience_;
  const steady_clock::time_point start_ = steady_clock::now();
  std::optional<steady_clock::time_point> deadline_;
  agent::FrameStream stream_;
  std::string_view stdin_text_;
  bool stdin_open_;
  size_t stdin_waiting_ = 0;  // was sent, and is not taken yet
  uint64_t seen_bytes_ = 0;
  ExecResult result_;
};

CopyCount ToCount(const agent::TreeCount& count) {
  return {.entries = count.entries, .bytes = count.bytes, .skipped = count.skipped};
}

}  // namespace

bool AgentListens(const std::string& directory) {
  const absl::Status connected = fs::ConnectUnix(directory, kAgentSocket, milliseconds(0)).status();
  return !absl::IsUnavailable(connected) && !absl::IsNotFound(connected);
}

absl::StatusOr<ExecResult> AgentExec(const std::string& directory,
                                     const agent::ExecMessage& message, const ExecRequest& request,
                                     const ExecPatience& patience) {
  ASSIGN_OR_RETURN(const UniqueFd socket, Ask(directory, FrameType::kExec, agent::Encode(message)));
  return Execution(socket.get(), request, patience).Run();
}

absl::StatusOr<agent::InfoMessage> AgentInfo(const std::string& directory) {
  ASSIGN_OR_RETURN(const UniqueFd socket, Ask(directory, FrameType::kInfo, ""));
  ASSIGN_OR_RETURN(const Frame frame, ReadAnswer(socket.get(), FrameType::kInfoReply));
  return agent::DecodeInfo(frame.content);
}

absl::Status AgentCloseSession(const std::string& directory, const std::string& name) {
  ASSIGN_OR_RETURN(const UniqueFd socket, Ask(directory, FrameType::kCloseSession, name));
  return ReadAnswer(socket.get(), FrameType::kDone).status();
}

absl::StatusOr<CopyCount> AgentPut(const std::string& directory, const agent::TreeMessage& tree,
                                   const std::string& from) {
  ASSIGN_OR_RETURN(const UniqueFd socket, Ask(directory, FrameType::kPutTree, agent::Encode(tree)));
  absl::StatusOr<agent::TreeCount> sent = agent::SendTree(socket.get(), from);
  if (absl::IsUnavailable(sent.status())) return WhyWriteFailed(socket.get(), sent.status());
  RETURN_IF_ERROR(sent.status());
  RETURN_IF_ERROR(ReadAnswer(socket.get(), FrameType::kDone).status());
  return ToCount(*sent);
}

absl::Status AgentPutFile(const std::string& directory, const agent::TreeMessage& tree,
                          std::string_view content, uint32_t mode) {
  ASSIGN_OR_RETURN(const UniqueFd socket, Ask(directory, FrameType::kPutTree, agent::Encode(tree)));
  const absl::Status sent = agent::SendFile(socket.get(), content, mode);
  if (absl::IsUnavailable(sent)) return WhyWriteFailed(socket.get(), sent);
  RETURN_IF_ERROR(sent);
  return ReadAnswer(socket.get(), FrameType::kDone).status();
}

absl::StatusOr<CopyCount> AgentGet(const std::string& directory, const std::string& path,
                                   const std::string& to, uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const UniqueFd socket, Ask(directory, FrameType::kGetTree,
                                              agent::Encode(agent::TreeMessage{.path = path})));
  const absl::StatusOr<agent::TreeCount> count =
      agent::ReceiveTree(socket.get(), to, {.max_bytes = max_bytes});
  RETURN_IF_ERROR(OfConnection(count.status()));
  return ToCount(*count);
}

absl::StatusOr<std::string> AgentGetFile(const std::string& directory, const std::string& path,
                                         uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const UniqueFd socket, Ask(directory, FrameType::kGetTree,
                                              agent::Encode(agent::TreeMessage{.path = path})));
  absl::StatusOr<std::string> content = agent::ReceiveFile(socket.get(), max_bytes);
  RETURN_IF_ERROR(OfConnection(content.status()));
  return content;
}

}  // namespace lamina::backends
