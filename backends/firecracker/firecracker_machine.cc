// SPDX-License-Identifier: Apache-2.0
#include "backends/firecracker/firecracker_machine.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <thread>

#include "backends/agent/frame.h"

namespace lamina::backends {
namespace {

using agent::FrameType;
using std::chrono::steady_clock;

constexpr useconds_t kPause = 20'000;
constexpr std::chrono::seconds kApiPatience{10};

// Copies what can be read from one socket to the other; false at the end.
bool Copy(int from, int to) {
  std::array<char, 65536> piece;
  const ssize_t got = ::recv(from, piece.data(), piece.size(), 0);
  if (got <= 0) return got < 0 && errno == EINTR;
  for (ssize_t sent = 0; sent < got;) {
    const ssize_t put =
        ::send(to, piece.data() + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    sent += put;
  }
  return true;
}

// One direction until its end. Each has a thread: a reader that waits must not hold up the other way.
void CopyAll(int from, int to) {
  while (Copy(from, to)) {
  }
  ::shutdown(to, SHUT_WR);
  ::shutdown(from, SHUT_RD);
}

class FirecrackerMachine : public Machine {
 public:
  FirecrackerMachine(ChildProcess process, std::string directory)
      : process_(std::move(process)), directory_(std::move(directory)) {}
  ~FirecrackerMachine() override {
    process_ = ChildProcess();
    while (relays_ > 0) ::usleep(kPause);
  }

  absl::Status Begin(const std::vector<ApiRequest>& requests);

  absl::Status AwaitAgent(std::chrono::milliseconds patience) override;
  int ended() const override { return process_.ended(); }
  void Connect(UniqueFd connection) override;
  absl::Status Pause() override { return SendRequest(directory_, PauseRequest()); }
  absl::Status Resume() override { return SendRequest(directory_, ResumeRequest()); }
  absl::Status SaveMemory(const std::string& directory) override {
    return SendRequest(directory_, SnapshotRequest(directory));
  }

 private:
  bool HasEnded() const {
    pollfd wait{process_.ended(), POLLIN};
    return ::poll(&wait, 1, 0) > 0;
  }
  absl::StatusOr<UniqueFd> ConnectAgent() const;

  ChildProcess process_;
  const std::string directory_;
  std::atomic<int> relays_ = 0;
};

absl::Status FirecrackerMachine::Begin(const std::vector<ApiRequest>& requests) {
  // The socket is there a moment after the process.
  const std::string socket = directory_ + "/" + kFirecrackerApi;
  const auto deadline = steady_clock::now() + kApiPatience;
  while (::access(socket.c_str(), F_OK) != 0) {
    if (HasEnded()) return absl::InternalError("Firecracker ended at once");
    if (steady_clock::now() > deadline) {
      return absl::DeadlineExceededError("Firecracker does not listen");
    }
    ::usleep(kPause);
  }
  for (const ApiRequest& request : requests) RETURN_IF_ERROR(SendRequest(directory_, request));
  return absl::OkStatus();
}

// Firecracker, docs/vsock.md: "CONNECT PORT" is answered with "OK HOST_PORT", then the rest is the
// connection.
absl::StatusOr<UniqueFd> FirecrackerMachine::ConnectAgent() const {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSIGN_OR_RETURN(const UniqueFd place, OpenFile(directory_, O_PATH | O_DIRECTORY));
  const std::string path = fmt::format("/proc/self/fd/{}/{}", place.get(), kFirecrackerVsock);
  sockaddr_un address{.sun_family = AF_UNIX};
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoStatus(errno, "connect to the machine's vsock");
  }
  const std::string request = fmt::format("CONNECT {}\n", kAgentVsockPort);
  if (::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) {
    return ErrnoStatus(errno, "connect to the agent");
  }
  std::string answer;
  constexpr size_t kMaxAnswer = 64;
  char byte = 0;
  while (answer.size() < kMaxAnswer && ::recv(socket.get(), &byte, 1, 0) == 1) {
    if (byte == '\n') break;
    answer.push_back(byte);
  }
  if (!answer.starts_with("OK ")) return absl::UnavailableError("the agent does not listen yet");
  return socket;
}

void FirecrackerMachine::Connect(UniqueFd connection) {
  ++relays_;
  std::thread([this, caller = std::move(connection)] {
    {
      absl::StatusOr<UniqueFd> agent = ConnectAgent();
      if (agent.ok()) {
        std::thread back([&] { CopyAll(agent->get(), caller.get()); });
        CopyAll(caller.get(), agent->get());
        back.join();
      }
    }
    --relays_;
  }).detach();
}

absl::Status FirecrackerMachine::AwaitAgent(std::chrono::milliseconds patience) {
  const auto deadline = steady_clock::now() + patience;
  while (steady_clock::now() < deadline) {
    if (HasEnded()) return absl::InternalError("the machine ended before its agent was there");
    const absl::StatusOr<UniqueFd> agent = ConnectAgent();
    if (agent.ok() && agent::WriteFrame(agent->get(), FrameType::kInfo, "").ok()) {
      const absl::StatusOr<agent::Frame> reply = agent::ReadFrame(agent->get());
      if (reply.ok() && reply->type == FrameType::kInfoReply) return absl::OkStatus();
    }
    ::usleep(kPause);
  }
  return absl::DeadlineExceededError("the agent does not answer");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Machine>> StartFirecrackerMachine(
    const std::vector<std::string>& command, const std::string& directory,
    const std::vector<ApiRequest>& requests, int output) {
  ASSIGN_OR_RETURN(ChildProcess process, ChildProcess::Start(command, {}, output));
  auto machine = std::make_unique<FirecrackerMachine>(std::move(process), directory);
  RETURN_IF_ERROR(machine->Begin(requests));
  return machine;
}

}  // namespace lamina::backends
