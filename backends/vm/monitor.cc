// SPDX-License-Identifier: Apache-2.0
#include "backends/vm/monitor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <optional>
#include <thread>

#include "backends/agent/frame.h"
#include "backends/agent/messages.h"
#include "backends/vm/control.h"

namespace lamina::backends {
namespace {

using agent::Frame;
using agent::FrameType;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// What a guest may write to its console is without end.
constexpr size_t kMaxConsoleFile = 256 << 10;
constexpr size_t kConsoleTail = 1500;

milliseconds Since(steady_clock::time_point time) {
  return std::chrono::duration_cast<milliseconds>(steady_clock::now() - time);
}

// Reads what the machine says, to its end.
class Console {
 public:
  static absl::StatusOr<std::unique_ptr<Console>> Open(const std::string& path) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
    auto console = std::make_unique<Console>();
    console->read_.Reset(ends[0]);
    console->write_.Reset(ends[1]);
    ASSIGN_OR_RETURN(console->file_, OpenFile(path, O_WRONLY | O_CREAT | O_TRUNC, 0600));
    console->thread_ = std::thread([self = console.get()] { self->Read(); });
    return console;
  }
  ~Console() { Finish(); }

  int write_end() const { return write_.get(); }
  // No more comes from this process.
  void Started() { write_.Reset(); }
  // Waits for its end, which is that of the machine, and returns its last lines on one line.
  std::string Finish() {
    write_.Reset();
    if (thread_.joinable()) thread_.join();
    std::string line;
    for (const char byte : tail_) {
      const bool printable = byte >= ' ' && byte < 127;
      if (printable) {
        line.push_back(byte);
      } else if (!line.empty() && line.back() != ' ') {
        line += byte == '\n' ? " | " : "";
      }
    }
    return line;
  }

 private:
  void Read() {
    std::array<char, 4096> piece;
    size_t written = 0;
    while (true) {
      const ssize_t got = ::read(read_.get(), piece.data(), piece.size());
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return;
      const std::string_view text(piece.data(), static_cast<size_t>(got));
      tail_ += text;
      if (tail_.size() > kConsoleTail) tail_.erase(0, tail_.size() - kConsoleTail);
      const std::string_view kept = text.substr(0, kMaxConsoleFile - written);
      written += kept.size();
      if (!kept.empty()) std::ignore = ::write(file_.get(), kept.data(), kept.size());
    }
  }

  UniqueFd read_;
  UniqueFd write_;
  UniqueFd file_;
  std::string tail_;  // of the thread, until it has ended
  std::thread thread_;
};

class Monitor {
 public:
  explicit Monitor(MonitorOptions options) : options_(std::move(options)) {}

  absl::Status Run();

 private:
  absl::Status Start(Console& console);
  absl::Status Serve();
  void TakeCalls();
  void Serve(UniqueFd call);
  absl::StatusOr<std::string> Answer(const Frame& request);
  absl::Status Save(const std::string& directory);
  absl::Status SetPaused(bool paused);
  bool IsPaused() {
    const std::lock_guard lock(mutex_);
    return paused_;
  }
  // How long the machine may go on; nothing: for ever.
  std::optional<milliseconds> Left();

  const MonitorOptions options_;
  std::unique_ptr<Machine> machine_;
  steady_clock::time_point ready_at_;

  std::mutex calls_;  // one at a time
  std::mutex mutex_;
  bool paused_ = false;
  std::atomic<bool> goes_on_ = false;  // paused by a snapshot that will resume it
};

absl::Status Monitor::Start(Console& console) {
  ASSIGN_OR_RETURN(machine_, options_.start(console.write_end()));
  console.Started();
  return machine_->AwaitAgent(options_.boot_patience);
}

absl::Status Monitor::Run() {
  ASSIGN_OR_RETURN(const std::unique_ptr<Console> console,
                   Console::Open(options_.directory + "/console.log"));
  if (absl::Status started = Start(*console); !started.ok()) {
    machine_.reset();
    const std::string last = console->Finish();
    return last.empty()
               ? started
               : absl::Status(started.code(), fmt::format("{}; its console: {}",
                                                          std::string(started.message()), last));
  }
  ready_at_ = steady_clock::now();
  options_.ready();
  std::thread([this] { TakeCalls(); }).detach();
  const absl::Status served = Serve();
  // A call under way has the machine to itself.
  const std::lock_guard lock(calls_);
  machine_.reset();
  return served;
}

// Asks the agent for how long no program has run. One that does not answer is not idle.
std::optional<milliseconds> IdleTime(Machine& machine) {
  constexpr timeval kPatience{.tv_sec = 5};
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return std::nullopt;
  const UniqueFd ours(ends[0]);
  ::setsockopt(ours.get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
  machine.Connect(UniqueFd(ends[1]));
  if (!agent::WriteFrame(ours.get(), FrameType::kInfo, "").ok()) return std::nullopt;
  const absl::StatusOr<Frame> reply = agent::ReadFrame(ours.get());
  if (!reply.ok() || reply->type != FrameType::kInfoReply) return std::nullopt;
  const absl::StatusOr<agent::InfoMessage> info = agent::DecodeInfo(reply->content);
  constexpr uint64_t kMost = uint64_t{1} << 50;
  if (!info.ok() || info->running > 0 || info->idle_ms > kMost) return std::nullopt;
  return milliseconds(info->idle_ms);
}

std::optional<milliseconds> Monitor::Left() {
  std::optional<milliseconds> left;
  if (options_.ttl.count() > 0) left = options_.ttl - Since(ready_at_);
  // A paused machine is not idle: somebody will want it again.
  if (options_.idle_ttl.count() > 0 && !IsPaused()) {
    // A snapshot's memory has the time of the machine that it is of.
    milliseconds idle_left = options_.idle_ttl - Since(ready_at_);
    if (idle_left.count() <= 0) {
      idle_left = options_.idle_ttl - IdleTime(*machine_).value_or(milliseconds(0));
    }
    left = left.has_value() ? std::min(*left, idle_left) : idle_left;
  } else if (options_.idle_ttl.count() > 0) {
    left = left.has_value() ? std::min(*left, options_.idle_ttl) : options_.idle_ttl;
  }
  return left;
}

absl::Status Monitor::Serve() {
  while (true) {
    int wait = -1;
    if (const std::optional<milliseconds> left = Left(); left.has_value()) {
      if (left->count() <= 0) return absl::OkStatus();
      constexpr int64_t kLongest = 3600 * 1000;
      wait = static_cast<int>(std::min<int64_t>(left->count(), kLongest));
    }
    std::array<pollfd, 2> waits{pollfd{options_.agent.get(), POLLIN},
                                pollfd{machine_->ended(), POLLIN}};
    if (::poll(waits.data(), waits.size(), wait) < 0 && errno != EINTR) {
      return ErrnoStatus(errno, "poll");
    }
    if (waits[1].revents != 0) return absl::OkStatus();
    if ((waits[0].revents & POLLIN) == 0) continue;
    UniqueFd connection(::accept4(options_.agent.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.valid()) {
      machine_->Connect(std::move(connection));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
      ::poll(nullptr, 0, 50);  // it stays in the queue
    }
  }
}

void Monitor::TakeCalls() {
  while (true) {
    UniqueFd call(::accept4(options_.control.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (call.valid()) {
      // A snapshot takes long, and others may ask meanwhile.
      std::thread([this, fd = std::move(call)]() mutable { Serve(std::move(fd)); }).detach();
    } else {
      ::poll(nullptr, 0, 50);
    }
  }
}

void Monitor::Serve(UniqueFd call) {
  constexpr timeval kPatience{.tv_sec = 10};
  ::setsockopt(call.get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
  const absl::StatusOr<Frame> request = agent::ReadFrame(call.get());
  if (!request.ok()) return;
  const absl::StatusOr<std::string> answer = Answer(*request);
  const absl::Status written =
      answer.ok()
          ? agent::WriteFrame(call.get(), FrameType::kDone, *answer)
          : agent::WriteFrame(call.get(), FrameType::kError, agent::Encode(answer.status()));
  written.IgnoreError();  // who asked has gone
}

absl::StatusOr<std::string> Monitor::Answer(const Frame& request) {
  const auto call = static_cast<MachineCall>(request.type);
  if (call == MachineCall::kState) {
    // One that is stopped for a snapshot goes on by itself.
    const bool paused = IsPaused() && !goes_on_;
    return std::string(paused ? kMachinePaused : kMachineRunning);
  }
  const std::lock_guard lock(calls_);
  if (machine_ == nullptr) return absl::UnavailableError("the machine has ended");
  switch (call) {
    case MachineCall::kPause:
      RETURN_IF_ERROR(SetPaused(true));
      return "";
    case MachineCall::kResume:
      RETURN_IF_ERROR(SetPaused(false));
      return "";
    case MachineCall::kSave:
      RETURN_IF_ERROR(Save(request.content));
      return "";
    default:
      return absl::InvalidArgumentError("the monitor is asked for what it does not know");
  }
}

absl::Status Monitor::SetPaused(bool paused) {
  if (IsPaused() == paused) return absl::OkStatus();
  RETURN_IF_ERROR(paused ? machine_->Pause() : machine_->Resume());
  const std::lock_guard lock(mutex_);
  paused_ = paused;
  return absl::OkStatus();
}

absl::Status Monitor::Save(const std::string& directory) {
  const bool was_paused = IsPaused();
  goes_on_ = !was_paused;
  absl::Status paused = SetPaused(true);
  if (!paused.ok()) goes_on_ = false;
  RETURN_IF_ERROR(paused);
  absl::Status saved = machine_->SaveMemory(directory);
  const std::string disk = options_.directory + "/" + kMachineDisk;
  if (saved.ok() && ::access(disk.c_str(), F_OK) == 0) {
    saved = CopySparseFile(disk, directory + "/" + kMachineDisk);
  }
  if (!was_paused) saved.Update(SetPaused(false));
  goes_on_ = false;
  return saved;
}

}  // namespace

absl::Status RunMonitor(MonitorOptions options) {
  auto monitor = std::make_unique<Monitor>(std::move(options));
  absl::Status served = monitor->Run();
  std::ignore = monitor.release();  // its threads have it
  return served;
}

}  // namespace lamina::backends
