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
#include <string_view>

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

[[noreturn]] void ExecCrun(const sigset_t& signals, const std::string& bundle,
                           const std::string& id) {
  ::sigprocmask(SIG_SETMASK, &signals, nullptr);
  HideHybridCgroup();
  ::execlp("crun", "crun", "run", "--bundle", bundle.c_str(), id.c_str(), nullptr);
  const int error = errno;
  ::dprintf(STDERR_FILENO, "lamina: start crun: %s\n", std::strerror(error));
  ::_exit(error == ENOENT ? 127 : 126);
}

bool FindInPath(std::string_view program) {
  const char* path = std::getenv("PATH");
  std::string_view rest = path != nullptr ? path : "/usr/bin:/bin";
  while (true) {
    const size_t end = rest.find(':');
    const std::string candidate = fmt::format("{}/{}", rest.substr(0, end), program);
    if (::access(candidate.c_str(), X_OK) == 0) return true;
    if (end == std::string_view::npos) return false;
    rest.remove_prefix(end + 1);
  }
}

}  // namespace

absl::StatusOr<int> RunWithCrun(const std::string& bundle, const std::string& id) {
  if (!FindInPath("crun")) {
    return absl::NotFoundError("crun is not on PATH: install the package crun");
  }
  sigset_t ours;
  sigset_t before;
  ::sigemptyset(&ours);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) ::sigaddset(&ours, signal);
  ::sigprocmask(SIG_BLOCK, &ours, &before);
  const UniqueFd signals(::signalfd(-1, &ours, SFD_CLOEXEC));
  const pid_t child = ::fork();
  if (child < 0) return ErrnoStatus(errno, "fork");
  if (child == 0) ExecCrun(before, bundle, id);

  int status = 0;
  while (true) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) break;
    signalfd_siginfo info{};
    if (::read(signals.get(), &info, sizeof(info)) != sizeof(info)) continue;
    // crun passes these on to the container's first process. A terminal sends SIGINT to crun
    // itself, which is in our process group; then the sender is the kernel and there is nothing to
    // pass on.
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal != SIGCHLD && info.ssi_code != SI_KERNEL) ::kill(child, signal);
  }
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace lamina::backends
