// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/direct_runner.h"

#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "backends/agent/program.h"
#include "backends/agent/pseudo_file.h"

namespace lamina::agent {
namespace {

using std::chrono::steady_clock;

constexpr int kLastCapability = 63;

// The session of a process, from /proc/PID/stat; -1 if it is gone. The name in it may be anything,
// so what counts comes after the last parenthesis: state, parent, group, session.
pid_t SessionOf(const char* pid) {
  const std::string stat = ReadPseudoFile(fmt::format("/proc/{}/stat", pid));
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return -1;
  int parent = 0;
  int group = 0;
  int session = -1;
  char state = 0;
  if (std::sscanf(stat.c_str() + name_end + 1, " %c %d %d %d", &state, &parent, &group, &session) !=
          4 ||
      state == 'Z' || state == 'X') {
    return -1;
  }
  return session;
}

// Kills all processes of a session. One that forks meanwhile may need another round.
void KillSession(pid_t session) {
  constexpr int kMaxRounds = 8;
  for (int round = 0; round < kMaxRounds; ++round) {
    ::kill(-session, SIGKILL);
    bool found = false;
    const std::unique_ptr<DIR, int (*)(DIR*)> processes(::opendir("/proc"), ::closedir);
    if (processes == nullptr) return;
    while (const dirent* process = ::readdir(processes.get())) {
      const char* name = process->d_name;
      pid_t pid = 0;
      if (std::from_chars(name, name + std::strlen(name), pid).ec != std::errc() || pid <= 1) {
        continue;
      }
      if (SessionOf(name) != session) continue;
      found = true;
      ::kill(pid, SIGKILL);
    }
    if (!found) return;
  }
}

class DirectRun : public Run {
 public:
  DirectRun(DirectRunner& runner, pid_t pid, UniqueFd ended, UniqueFd failure,
            steady_clock::time_point start, uint64_t kills, uint64_t cpu_limit_ms)
      : runner_(runner),
        pid_(pid),
        ended_(std::move(ended)),
        failure_(std::move(failure)),
        start_(start),
        kills_(kills),
        cpu_limit_us_(cpu_limit_ms * 1000) {}
  ~DirectRun() override {
    if (!death_.has_value()) death_ = runner_.Take(pid_);
    if (death_.has_value()) return;
    Kill();
    // The reaper forgets it only when it was taken.
    uint64_t ignored = 0;
    while (!death_.has_value()) {
      if (::read(ended_.get(), &ignored, sizeof(ignored)) < 0 && errno != EINTR) return;
      death_ = runner_.Take(pid_);
    }
  }

  int64_t pid() const override { return pid_; }
  int ended() const override { return ended_.get(); }
  void Signal(int signal) override {
    // The group: a shell's children as well, as a terminal does it. At first it has none of its own.
    if (!death_.has_value() && ::kill(-pid_, signal) != 0) runner_.Signal(pid_, signal);
  }
  void Kill() override {
    runner_.Signal(pid_, SIGKILL);
    KillSession(pid_);
  }
  absl::StatusOr<EndedMessage> Result() override;

 private:
  DirectRunner& runner_;
  const pid_t pid_;
  UniqueFd ended_;
  const UniqueFd failure_;  // has why it did not become its program, if it did not
  const steady_clock::time_point start_;
  const uint64_t kills_;  // of the group, before it was started
  const uint64_t cpu_limit_us_;
  std::optional<Death> death_;
};

absl::StatusOr<EndedMessage> DirectRun::Result() {
  if (!death_.has_value()) death_ = runner_.Take(pid_);
  if (!death_.has_value()) return absl::InternalError("the process' end was not seen");
  EndedMessage ended;
  const rusage& usage = death_->usage;
  ended.cpu_us = ProcessorTime(usage);
  ended.peak_bytes = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
  ended.wall_us = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(death_->when - start_).count());
  StartFailure failure;
  if (::read(failure_.get(), &failure, sizeof(failure)) == sizeof(failure)) {
    SetCannotStart(failure, ended);
  } else if (WIFSIGNALED(death_->status)) {
    ended.code = WTERMSIG(death_->status);
    ended.ending = ended.code == SIGXCPU   ? Ending::kTimeLimit
                   : ended.code == SIGXFSZ ? Ending::kOutputLimit
                                           : Ending::kSignalled;
    if (ended.code == SIGKILL && runner_.MemoryKills() > kills_) {
      // Counted by the kernel before it kills.
      ended.ending = Ending::kMemoryLimit;
    } else if (ended.code == SIGKILL && cpu_limit_us_ > 0 && ended.cpu_us >= cpu_limit_us_) {
      // Of those that ignore SIGXCPU (agent/program.cc).
      ended.ending = Ending::kTimeLimit;
    }
  } else {
    ended.code = WEXITSTATUS(death_->status);
  }
  return ended;
}

sigset_t SignalOfADeath() {
  sigset_t death;
  ::sigemptyset(&death);
  ::sigaddset(&death, SIGCHLD);
  return death;
}

// What follows: between fork and exec.

// From the bounding set, so that they do not come back with an exec by root.
int DropCapabilities(uint64_t kept) {
  for (int capability = 0; capability <= kLastCapability; ++capability) {
    if (((kept >> capability) & 1) != 0) continue;
    if (::prctl(PR_CAPBSET_READ, capability, 0, 0, 0) <= 0) continue;
    if (::prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0) return errno;
  }
  // Nothing may be handed on to a program by other ways either.
  ::prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> sets{};
  if (::syscall(SYS_capget, &header, sets.data()) != 0) return errno;
  for (__user_cap_data_struct& set : sets) set.inheritable = 0;
  return ::syscall(SYS_capset, &header, sets.data()) == 0 ? 0 : errno;
}

int TakeIdentity(const ExecMessage& message, std::optional<uint64_t> capabilities) {
  if (capabilities.has_value()) {
    const int dropped = DropCapabilities(*capabilities);
    if (dropped != 0) return dropped;
  }
  if (::getuid() != 0 && message.uid == ::getuid()) return 0;
  GivePipesTo(message.uid, message.gid);
  if (::setgroups(message.groups.size(), message.groups.data()) != 0 ||
      ::setresgid(message.gid, message.gid, message.gid) != 0 ||
      ::setresuid(message.uid, message.uid, message.uid) != 0) {
    return errno;
  }
  return 0;
}

}  // namespace

std::unique_ptr<DirectRunner> DirectRunner::Start(DirectRunnerOptions options) {
  std::unique_ptr<DirectRunner> runner(new DirectRunner(std::move(options)));
  // Kept for the reaper, whatever whoever started this process made of it.
  ::signal(SIGCHLD, SIG_DFL);
  const sigset_t death = SignalOfADeath();
  ::pthread_sigmask(SIG_BLOCK, &death, nullptr);
  std::thread([reaper = runner.get()] { reaper->Reap(); }).detach();
  return runner;
}

void DirectRunner::Reap() {
  const sigset_t death = SignalOfADeath();
  while (true) {
    siginfo_t info{};
    // The process stays a zombie, and its number taken, until it is known whose it was.
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOWAIT) != 0) {
      // Without a child: sleeps until one, or an orphan that somebody left here, has died.
      int ignored = 0;
      if (errno == ECHILD) ::sigwait(&death, &ignored);
      continue;
    }
    const std::lock_guard lock(mutex_);
    Death death;
    if (::wait4(info.si_pid, &death.status, 0, &death.usage) != info.si_pid) continue;
    death.when = steady_clock::now();
    const auto child = children_.find(info.si_pid);
    if (child == children_.end()) continue;
    child->second.death = death;
    const uint64_t one = 1;
    std::ignore = ::write(child->second.ended, &one, sizeof(one));
  }
}

std::optional<Death> DirectRunner::Take(pid_t pid) {
  const std::lock_guard lock(mutex_);
  const auto child = children_.find(pid);
  if (child == children_.end() || !child->second.death.has_value()) return std::nullopt;
  const std::optional<Death> death = child->second.death;
  children_.erase(child);
  return death;
}

void DirectRunner::Signal(pid_t pid, int signal) {
  // Not while it is reaped: its number may then be another one's.
  const std::lock_guard lock(mutex_);
  const auto child = children_.find(pid);
  if (child != children_.end() && !child->second.death.has_value()) ::kill(pid, signal);
}

uint64_t DirectRunner::MemoryKills() const {
  if (options_.memory_events.empty()) return 0;
  const std::string events = ReadPseudoFile(options_.memory_events);
  constexpr std::string_view kCount = "\noom_kill ";
  const size_t at = events.find(kCount);
  return at == std::string::npos ? 0
                                 : std::strtoull(events.c_str() + at + kCount.size(), nullptr, 10);
}

absl::StatusOr<std::unique_ptr<Run>> DirectRunner::Start(const ExecMessage& message,
                                                         Streams streams) {
  if (!message.files_in.empty() || !message.files_out.empty()) {
    return absl::UnimplementedError("files go with a call only where each call starts clean");
  }
  const Program program(message);
  UniqueFd ended(::eventfd(0, EFD_CLOEXEC));
  std::array<int, 2> ends{};
  if (!ended.valid() || ::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  UniqueFd failure_read(ends[0]);
  const UniqueFd failure_write(ends[1]);
  ::fcntl(failure_read.get(), F_SETFL, O_NONBLOCK);
  const uint64_t kills = MemoryKills();
  const steady_clock::time_point start = steady_clock::now();
  pid_t pid = 0;
  {
    const std::lock_guard lock(mutex_);
    pid = ::fork();
    if (pid == 0) {
      // Before its descriptors are others.
      const int group = options_.group.get();
      const int failed = group >= 0 && ::write(group, "0", 1) < 0 ? errno : 0;
      program.Become(streams, failure_write.get(), [&] {
        return failed != 0 ? failed : TakeIdentity(message, options_.capabilities);
      });
    }
    if (pid < 0) {
      const int error = errno;
      if (error == EAGAIN) {
        return absl::ResourceExhaustedError("the sandbox, or its machine, has no process left");
      }
      return ErrnoStatus(error, "start a process in the sandbox");
    }
    children_[pid].ended = ended.get();
  }
  // Nobody waits until it has become its program, which may take for ever: the way to it leads through
  // what programs make, like file systems of their own.
  return std::make_unique<DirectRun>(*this, pid, std::move(ended), std::move(failure_read), start,
                                     kills, message.cpu_ms);
}

}  // namespace lamina::agent
