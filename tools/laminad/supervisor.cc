// SPDX-License-Identifier: Apache-2.0
#include "tools/laminad/supervisor.h"

#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "chunkstore/base/descriptor_message.h"
#include "chunkstore/base/file.h"
#include "fs/engine/descriptor_holder.h"
#include "fs/engine/engine.h"

namespace lamina::daemon {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kFirstInherited = 3;
constexpr const char* kFusePrefix = "fuse";

// A worker that has served this long is well: troubles before it are over.
constexpr milliseconds kWell{5'000};
// Between attempts to start a worker, twice as long each time.
constexpr milliseconds kFirstPause{20};
constexpr milliseconds kLongestPause{1'000};
// How long a worker that was told to end may take.
constexpr milliseconds kEndFor{60'000};

sigset_t Signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) ::sigaddset(&signals, signal);
  return signals;
}

std::string ExitText(int status) {
  if (WIFSIGNALED(status)) return fmt::format("was killed by signal {}", WTERMSIG(status));
  return fmt::format("ended with status {}", WEXITSTATUS(status));
}

// Whether a listening socket that was inherited is the one that is wanted at a path.
bool ListensAt(int socket, const std::string& path) {
  if (path.empty()) return true;
  sockaddr_un address{};
  socklen_t length = sizeof(address);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      address.sun_family != AF_UNIX || length <= offsetof(sockaddr_un, sun_path)) {
    return false;
  }
  // unix(7): the path may take all of the room, without a NUL at its end.
  const size_t most = length - offsetof(sockaddr_un, sun_path);
  const std::string bound(address.sun_path, ::strnlen(address.sun_path, most));
  std::error_code error;
  return bound == path || std::filesystem::equivalent(bound, path, error);
}

class Supervisor {
 public:
  explicit Supervisor(const SupervisorOptions& options) : options_(options) {}
  ~Supervisor() {
    for (const std::string& path : made_) ::unlink(path.c_str());
  }

  absl::Status Start();
  absl::Status Run();

 private:
  enum class Stopping { kNo, kUnmount, kLeaveMounts };

  absl::Status StartWorker();
  [[noreturn]] void BecomeWorker(pid_t parent, int notify);
  void ReceiveMessages();
  void Obey(std::string_view message, UniqueFd fd);
  absl::Status ReapWorker();
  absl::Status AfterDeath(int status);
  absl::Status HandleSignal(int signal);
  void StartCheck();
  void ReapCheck();
  void HandOver();
  absl::Status EndWorker();
  absl::Status GiveUp();
  bool HoldsMounts() const;
  int Patience() const;
  absl::Status OnTime();

  const SupervisorOptions options_;
  fs::NotifySocket systemd_;  // not valid if it is not there
  std::multimap<std::string, UniqueFd> held_;
  std::vector<std::string> made_;  // paths of sockets
  UniqueFd signals_;

  pid_t worker_ = 0;
  UniqueFd messages_;  // from the worker
  pid_t check_ = 0;
  bool check_again_ = false;  // the configuration may have changed since this one began
  bool ready_ = false;
  bool was_ever_ready_ = false;
  bool handing_over_ = false;
  bool hand_over_when_ready_ = false;
  Stopping stopping_ = Stopping::kNo;
  bool replaced_at_end_ = false;
  int failed_starts_ = 0;
  Clock::time_point ready_since_;
  std::optional<Clock::time_point> trouble_since_;  // readers may wait since then
  std::optional<Clock::time_point> start_at_;       // of the next worker
  std::optional<Clock::time_point> kill_at_;        // a worker that should have ended by then
};

absl::Status Supervisor::Start() {
  // Two descriptors for each mount that is served whole, here and on their way.
  RaiseDescriptorLimit();
  ASSIGN_OR_RETURN(held_, fs::InheritedDescriptors());
  ASSIGN_OR_RETURN(systemd_, fs::NotifySocket::FromEnvironment());
  // Held as long as this process lives: no other engine may come between two workers.
  ASSIGN_OR_RETURN(UniqueFd lock, fs::LockStateDirectory(options_.state));
  held_.emplace("lock", std::move(lock));
  for (const ListeningSocket& wanted : options_.sockets) {
    const auto [first, last] = held_.equal_range(wanted.name);
    const bool inherited = std::any_of(first, last, [&wanted](const auto& held) {
      return ListensAt(held.second.get(), wanted.path);
    });
    if (inherited) continue;
    ASSIGN_OR_RETURN(UniqueFd socket, wanted.open());
    held_.emplace(wanted.name, std::move(socket));
    if (!wanted.path.empty()) made_.push_back(wanted.path);
  }
  const sigset_t signals = Signals();
  signals_.Reset(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return ErrnoStatus(errno, "signalfd");
  return StartWorker();
}

bool Supervisor::HoldsMounts() const {
  const auto first = held_.lower_bound(kFusePrefix);
  return first != held_.end() && first->first.starts_with(kFusePrefix);
}

absl::Status Supervisor::StartWorker() {
  start_at_.reset();
  if (!trouble_since_) trouble_since_ = Clock::now();
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus(errno, "socketpair");
  }
  messages_.Reset(ends[0]);
  const UniqueFd theirs(ends[1]);
  ready_ = false;
  const pid_t self = ::getpid();
  worker_ = ::fork();
  if (worker_ < 0) {
    worker_ = 0;
    return ErrnoStatus(errno, "fork the worker");
  }
  if (worker_ == 0) BecomeWorker(self, theirs.get());
  return absl::OkStatus();
}

// sd_listen_fds(3): descriptors from 3 on, their names in the environment.
void Supervisor::BecomeWorker(pid_t parent, int notify) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody would keep what it opens
  if (::getppid() != parent) ::_exit(1);
  std::vector<std::string> names;
  std::vector<int> fds;
  for (const auto& [name, fd] : held_) {
    names.push_back(name);
    fds.push_back(fd.get());
  }
  names.emplace_back(fs::DescriptorHolder::kNotifyName);
  fds.push_back(notify);
  const int end = kFirstInherited + static_cast<int>(fds.size());
  // Out of the way first: places may be taken by each other.
  for (int& fd : fds) fd = ::fcntl(fd, F_DUPFD, end);
  for (size_t i = 0; i < fds.size(); ++i) {
    if (::dup2(fds[i], kFirstInherited + static_cast<int>(i)) < 0) ::_exit(1);
  }
  ::close_range(static_cast<unsigned>(end), ~0U, 0);
  ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
  ::setenv("LISTEN_FDS", std::to_string(fds.size()).c_str(), 1);
  ::setenv("LISTEN_FDNAMES", absl::StrJoin(names, ":").c_str(), 1);
  // The others stay blocked, as the worker wants them: one that comes too early waits.
  sigset_t unblocked;
  ::sigemptyset(&unblocked);
  ::sigaddset(&unblocked, SIGCHLD);
  ::sigprocmask(SIG_UNBLOCK, &unblocked, nullptr);

  std::vector<char*> arguments;
  for (const std::string& argument : options_.command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  // After every second failure the program that runs already, which did start once.
  if (failed_starts_ % 2 == 0) ::execv(arguments[0], arguments.data());
  ::execv("/proc/self/exe", arguments.data());
  ::_exit(127);
}

absl::Status Supervisor::Run() {
  while (true) {
    pollfd events[] = {{.fd = signals_.get(), .events = POLLIN},
                       {.fd = worker_ != 0 ? messages_.get() : -1, .events = POLLIN}};
    if (::poll(events, std::size(events), Patience()) < 0 && errno != EINTR) {
      return ErrnoStatus(errno, "poll");
    }
    if (events[1].revents != 0) ReceiveMessages();
    signalfd_siginfo signal{};
    while (::read(signals_.get(), &signal, sizeof(signal)) == sizeof(signal)) {
      if (signal.ssi_signo == SIGCHLD) continue;
      RETURN_IF_ERROR(HandleSignal(static_cast<int>(signal.ssi_signo)));
    }
    if (check_ != 0) ReapCheck();
    if (worker_ != 0) RETURN_IF_ERROR(ReapWorker());
    if (worker_ == 0 && stopping_ != Stopping::kNo) return absl::OkStatus();
    RETURN_IF_ERROR(OnTime());
  }
}

// Milliseconds until something is due, as poll(2) takes them.
int Supervisor::Patience() const {
  std::optional<Clock::time_point> due;
  const auto consider = [&due](const std::optional<Clock::time_point>& time) {
    if (time && (!due || *time < *due)) due = time;
  };
  consider(start_at_);
  consider(kill_at_);
  if (trouble_since_) {
    consider(ready_ ? ready_since_ + kWell : *trouble_since_ + options_.give_up_after);
  }
  if (!due) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*due - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 3'600'000));
}

absl::Status Supervisor::OnTime() {
  const Clock::time_point now = Clock::now();
  if (kill_at_ && now >= *kill_at_) {
    kill_at_.reset();
    spdlog::warn("the worker took too long to end: killing it");
    if (worker_ != 0) ::kill(worker_, SIGKILL);
  }
  if (trouble_since_ && ready_ && now >= ready_since_ + kWell) trouble_since_.reset();
  const bool patient = !trouble_since_ || now < *trouble_since_ + options_.give_up_after;
  if (!patient && !ready_ && stopping_ == Stopping::kNo) return GiveUp();
  if (!start_at_ || now < *start_at_) return absl::OkStatus();
  // A machine without memory for a process now may have it soon: the mounts are kept until then.
  if (absl::Status status = StartWorker(); !status.ok()) {
    spdlog::error("start a worker: {}", std::string(status.message()));
    messages_.Reset();
    start_at_ = Clock::now() + kLongestPause;
  }
  return absl::OkStatus();
}

absl::Status Supervisor::HandleSignal(int signal) {
  if (signal == SIGHUP) {
    StartCheck();
    return absl::OkStatus();
  }
  stopping_ = systemd_.valid() ? Stopping::kLeaveMounts : Stopping::kUnmount;
  return EndWorker();
}

// By the program on the disk: another version may have other settings.
void Supervisor::StartCheck() {
  check_again_ = check_ != 0;
  if (check_again_) return;
  const pid_t self = ::getpid();
  check_ = ::fork();
  if (check_ < 0) {
    check_ = 0;
    spdlog::error("the worker goes on: fork to check the configuration: {}", std::strerror(errno));
    return;
  }
  if (check_ != 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != self) ::_exit(1);
  std::vector<char*> arguments;
  for (const std::string& argument : options_.check) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  ::_exit(127);
}

void Supervisor::ReapCheck() {
  int status = 0;
  if (::waitpid(check_, &status, WNOHANG) != check_) return;
  check_ = 0;
  if (check_again_) return StartCheck();
  if (WIFEXITED(status) && WEXITSTATUS(status) == kWrongConfiguration) {
    spdlog::error("the worker goes on: the new configuration is refused");  // it has said why
    return;
  }
  // One that only starts may be the earlier program, and cannot be asked yet.
  hand_over_when_ready_ = !ready_;
  if (ready_) HandOver();
}

void Supervisor::HandOver() {
  if (worker_ == 0 || stopping_ != Stopping::kNo) return;
  spdlog::info("the worker hands over");
  handing_over_ = true;
  kill_at_ = Clock::now() + options_.drain_for;
  ::kill(worker_, SIGHUP);
}

absl::Status Supervisor::EndWorker() {
  start_at_.reset();
  const bool leave = stopping_ == Stopping::kLeaveMounts;
  // Only a worker can unmount.
  if (worker_ == 0 && !leave && HoldsMounts()) RETURN_IF_ERROR(StartWorker());
  if (worker_ == 0) return absl::OkStatus();
  kill_at_ = Clock::now() + (leave ? options_.drain_for : kEndFor);
  ::kill(worker_, leave ? SIGHUP : SIGTERM);
  return absl::OkStatus();
}

void Supervisor::ReceiveMessages() {
  while (true) {
    auto message = ReceiveDescriptorMessage(messages_.get(), MSG_DONTWAIT);
    if (!message.ok() || message->text.empty()) return;
    Obey(message->text, message->TakeFirst());
  }
}

void Supervisor::Obey(std::string_view message, UniqueFd fd) {
  bool store = false;
  bool remove = false;
  bool ready = false;
  std::string name;
  for (const absl::string_view line :
       absl::StrSplit(absl::string_view(message.data(), message.size()), '\n')) {
    store = store || line == "FDSTORE=1";
    remove = remove || line == "FDSTOREREMOVE=1";
    ready = ready || line == "READY=1";
    constexpr absl::string_view kName = "FDNAME=";
    if (line.substr(0, kName.size()) == kName) name = std::string(line.substr(kName.size()));
  }
  if (absl::Status status = systemd_.Send(message, fd.get()); !status.ok()) {
    spdlog::error("{}", std::string(status.message()));
  }
  if (store && fd.valid()) held_.emplace(name, std::move(fd));
  if (remove) held_.erase(name);
  if (!ready) return;
  ready_ = true;
  ready_since_ = Clock::now();
  was_ever_ready_ = true;
  if (std::exchange(hand_over_when_ready_, false)) HandOver();
  failed_starts_ = 0;
}

absl::Status Supervisor::ReapWorker() {
  int status = 0;
  const pid_t ended = ::waitpid(worker_, &status, WNOHANG);
  if (ended != worker_) return absl::OkStatus();
  worker_ = 0;
  kill_at_.reset();
  ReceiveMessages();  // what it said last
  messages_.Reset();
  return AfterDeath(status);
}

absl::Status Supervisor::AfterDeath(int status) {
  const bool expected = std::exchange(handing_over_, false);
  if (stopping_ != Stopping::kNo) {
    // One that was killed as it was told to end has not unmounted anything. Another one may.
    const bool killed = WIFSIGNALED(status) && !std::exchange(replaced_at_end_, true);
    return killed && HoldsMounts() ? EndWorker() : absl::OkStatus();
  }
  const Clock::time_point now = Clock::now();
  // One that could hand over was well, however short a time it served.
  if (!trouble_since_ || expected) trouble_since_ = now;
  if (expected) {
    start_at_ = now;
    return absl::OkStatus();
  }
  spdlog::warn("the worker {}", ExitText(status));
  if (ready_) {
    ready_ = false;
    start_at_ = now;
    return absl::OkStatus();
  }
  // It has said why.
  if (!was_ever_ready_ && !HoldsMounts() && WIFEXITED(status)) {
    return absl::UnavailableError(
        fmt::format("the worker {} before it was ready", ExitText(status)));
  }
  start_at_ = now + std::min(kLongestPause, kFirstPause * (1 << std::min(failed_starts_, 10)));
  ++failed_starts_;
  return absl::OkStatus();
}

// Closing the last descriptor of a connection makes the kernel end it.
absl::Status Supervisor::GiveUp() {
  if (worker_ != 0) {
    ::kill(worker_, SIGKILL);
    while (::waitpid(worker_, nullptr, 0) < 0 && errno == EINTR) {
    }
    worker_ = 0;
    ReceiveMessages();
  }
  for (const auto& [name, fd] : held_) {
    if (name.starts_with(kFusePrefix)) systemd_.Remove(name).IgnoreError();
  }
  std::erase_if(held_, [](const auto& held) { return held.first.starts_with(kFusePrefix); });
  return absl::DeadlineExceededError(fmt::format(
      "no worker came up in {} s: its mounts are given up, and reads of them fail from now on",
      std::chrono::duration<double>(options_.give_up_after).count()));
}

}  // namespace

absl::Status RunSupervisor(const SupervisorOptions& options) {
  const sigset_t signals = Signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  Supervisor supervisor(options);
  RETURN_IF_ERROR(supervisor.Start());
  return supervisor.Run();
}

}  // namespace lamina::daemon
