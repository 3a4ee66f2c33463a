// SPDX-License-Identifier: Apache-2.0
#include "backends/crun.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

constexpr const char* kUnifiedHierarchy = "/sys/fs/cgroup/unified";

// crun refuses to start where cgroup v2 is mounted beside v1 ("hybrid") and has controllers. It
// runs well on the v1 part, so it gets a mount namespace that does not show the other one.
void HideHybridCgroup() {
  const std::string controllers = std::string(kUnifiedHierarchy) + "/cgroup.controllers";
  if (::access(controllers.c_str(), F_OK) != 0) return;
  if (::unshare(CLONE_NEWNS) != 0) return;
  // Slave: unmounts on the host still reach this namespace, so that it pins nothing.
  ::mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr);
  ::umount2(kUnifiedHierarchy, MNT_DETACH);
}

// The environment without what is for the service that this is run in: a runtime that detaches would
// wait until the container tells the socket that it is ready, and hand on descriptors of those numbers.
std::vector<char*> DetachedEnvironment() {
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    const std::string_view name = text.substr(0, text.find('='));
    const bool of_service = name == "NOTIFY_SOCKET" || name == "LISTEN_FDS" ||
                            name == "LISTEN_PID" || name == "LISTEN_FDNAMES";
    if (!of_service) environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  return environment;
}

// For a child process: becomes `RUNTIME ARGUMENTS...` with the signal mask `signals`.
[[noreturn]] void ExecCrun(const sigset_t& signals, std::vector<const char*> arguments,
                           const char* runtime = "crun", char** environment = environ) {
  ::sigprocmask(SIG_SETMASK, &signals, nullptr);
  HideHybridCgroup();
  arguments.insert(arguments.begin(), runtime);
  arguments.push_back(nullptr);
  ::execvpe(runtime, const_cast<char**>(arguments.data()), environment);
  const int error = errno;
  ::dprintf(STDERR_FILENO, "lamina: start %s: %s\n", runtime, std::strerror(error));
  ::_exit(error == ENOENT ? 127 : 126);
}

// All signals but those that a process sends itself by a fault, that stop and continue it (the
// terminal's go to crun as well), and SIGPIPE.
sigset_t SignalsToPassOn() {
  sigset_t signals;
  ::sigfillset(&signals);
  for (const int kept : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGTSTP,
                         SIGTTIN, SIGTTOU, SIGCONT, SIGPIPE}) {
    ::sigdelset(&signals, kept);
  }
  return signals;
}

// The last message in crun's log; empty if there is none.
std::string LastMessage(const std::string& log) {
  constexpr uint64_t kMaxLog = 1 << 20;
  const absl::StatusOr<std::string> text = ReadFileToString(log, kMaxLog);
  if (!text.ok()) return "";
  std::string_view lines = *text;
  while (lines.ends_with('\n')) lines.remove_suffix(1);
  const std::string_view last = lines.substr(lines.rfind('\n') + 1);
  const auto entry = nlohmann::json::parse(last, nullptr, /*allow_exceptions=*/false);
  if (!entry.is_object() || !entry.contains("msg") || !entry["msg"].is_string()) {
    return std::string(last);
  }
  return entry["msg"].get<std::string>();
}

}  // namespace

std::string PathOf(std::string_view program) {
  const char* path = std::getenv("PATH");
  std::string_view rest = path != nullptr ? path : "/usr/bin:/bin";
  while (true) {
    const size_t end = rest.find(':');
    std::string candidate = fmt::format("{}/{}", rest.substr(0, end), program);
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
    if (end == std::string_view::npos) return "";
    rest.remove_prefix(end + 1);
  }
}

bool IsOnPath(std::string_view program) { return !PathOf(program).empty(); }

absl::StatusOr<int> RunWithCrun(const std::string& bundle, const std::string& id, int lock) {
  if (!IsOnPath("crun")) {
    return absl::NotFoundError("crun is not on PATH: install the package crun");
  }
  const sigset_t ours = SignalsToPassOn();
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &ours, &before);
  const UniqueFd signals(::signalfd(-1, &ours, SFD_CLOEXEC));
  const pid_t child = ::fork();
  if (child < 0) return ErrnoStatus(errno, "fork");
  if (child == 0) {
    ::fcntl(lock, F_SETFD, 0);
    ExecCrun(before, {"run", "--bundle", bundle.c_str(), id.c_str()});
  }

  int status = 0;
  int stop_signals = 0;
  while (::waitpid(child, &status, WNOHANG) != child) {
    signalfd_siginfo info{};
    if (::read(signals.get(), &info, sizeof(info)) != sizeof(info)) continue;
    // crun passes these on to the container's first process. A terminal sends SIGINT to crun
    // itself, which is in our process group; then the sender is the kernel and there is nothing to
    // pass on.
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD || info.ssi_code == SI_KERNEL) continue;
    const bool stops = signal == SIGTERM || signal == SIGINT;
    if (stops) ++stop_signals;
    ::kill(child, stops && stop_signals > 1 ? SIGKILL : signal);
  }
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  if (WIFSIGNALED(status)) {
    // It cannot have cleaned up, and the container may still run.
    DeleteContainer(id);
    return 128 + WTERMSIG(status);
  }
  return WEXITSTATUS(status);
}

absl::StatusOr<pid_t> StartDetached(const DetachedContainer& container) {
  const char* runtime = container.runtime.c_str();
  if (!IsOnPath(runtime)) {
    return absl::NotFoundError(
        fmt::format("{} is not on PATH: install the package {}", runtime, runtime));
  }
  const std::string log = container.bundle + "/runtime.log";
  const std::string pid_file = container.bundle + "/pid";
  const std::string preserve = fmt::format("--preserve-fds={}", container.descriptors.size());
  const std::vector<std::string> arguments = {"--root=" + container.root,
                                              "--log=" + log,
                                              "--log-format=json",
                                              "run",
                                              "--detach",
                                              preserve,
                                              "--bundle=" + container.bundle,
                                              "--pid-file=" + pid_file,
                                              container.id};
  std::vector<const char*> words;
  for (const std::string& argument : arguments) words.push_back(argument.c_str());
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  std::vector<int> passed = container.descriptors;
  std::vector<char*> environment = DetachedEnvironment();
  // Until it executes, the child is in this process' memory, which a copy would cost more than the rest
  // of its start; this process waits so long, and uses nothing that the child changes.
  const pid_t child = ::vfork();
  if (child < 0) return ErrnoStatus(errno, "vfork");
  if (child == 0) {
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
      ::dup2(null.get(), stream);
    }
    // Out of the way first: one may have the number that another one gets.
    constexpr int kOutOfTheWay = 64;
    for (int& descriptor : passed) descriptor = ::fcntl(descriptor, F_DUPFD_CLOEXEC, kOutOfTheWay);
    // A runtime hands on to the container only what it is told to.
    if (container.lock >= 0) ::fcntl(container.lock, F_DUPFD, kOutOfTheWay);
    int next = STDERR_FILENO + 1;
    for (const int descriptor : passed) ::dup2(descriptor, next++);
    sigset_t none;
    ::sigemptyset(&none);
    ExecCrun(none, std::move(words), runtime, environment.data());
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) {
    const std::string said = LastMessage(log);
    return absl::InternalError(
        fmt::format("{}: {}", runtime, said.empty() ? fmt::format("status {:#x}", status) : said));
  }
  ASSIGN_OR_RETURN(const std::string text, ReadFileToString(pid_file, 64), "{}", runtime);
  const long pid = std::strtol(text.c_str(), nullptr, 10);
  if (pid <= 1) return absl::InternalError(fmt::format("{}: no process number", runtime));
  return static_cast<pid_t>(pid);
}

void DeleteContainer(const std::string& id) {
  const pid_t child = ::fork();
  if (child == 0) {
    // It says so if there is no such container.
    const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
      ::dup2(null.get(), stream);
    }
    sigset_t none;
    ::sigemptyset(&none);
    ExecCrun(none, {"delete", "--force", id.c_str()});
  }
  int ignored = 0;
  while (child > 0 && ::waitpid(child, &ignored, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace lamina::backends
