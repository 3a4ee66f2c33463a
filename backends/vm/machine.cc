// SPDX-License-Identifier: Apache-2.0
#include "backends/vm/machine.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace lamina::backends {

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::vector<std::string>& arguments,
                                                 const std::vector<int>& descriptors, int output) {
  std::vector<char*> words;
  for (const std::string& argument : arguments) {
    words.push_back(const_cast<char*>(argument.c_str()));
  }
  words.push_back(nullptr);
  std::vector<int> high = descriptors;
  const pid_t parent = ::getpid();
  ChildProcess child;
  child.pid_ = ::fork();
  if (child.pid_ < 0) return ErrnoStatus(errno, "fork");
  if (child.pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (::getppid() != parent) ::_exit(1);
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    constexpr int kOutOfTheWay = 64;
    for (int& descriptor : high) descriptor = ::fcntl(descriptor, F_DUPFD_CLOEXEC, kOutOfTheWay);
    ::dup2(::open("/dev/null", O_RDWR | O_CLOEXEC), STDIN_FILENO);
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
    int next = STDERR_FILENO + 1;
    for (const int descriptor : high) ::dup2(descriptor, next++);
    ::syscall(SYS_close_range, next, ~0U, CLOSE_RANGE_CLOEXEC);
    ::execvp(words[0], words.data());
    ::dprintf(STDERR_FILENO, "start %s: %s\n", words[0], std::strerror(errno));
    ::_exit(127);
  }
  child.pidfd_.Reset(static_cast<int>(::syscall(SYS_pidfd_open, child.pid_, 0)));
  if (!child.pidfd_.valid()) return ErrnoStatus(errno, "pidfd_open");
  return child;
}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

absl::Status CopySparseFile(const std::string& from, const std::string& to) {
  ASSIGN_OR_RETURN(const UniqueFd source, OpenFile(from, O_RDONLY));
  ASSIGN_OR_RETURN(const UniqueFd copy, OpenFile(to, O_WRONLY | O_CREAT | O_EXCL, 0600));
  if (::ioctl(copy.get(), FICLONE, source.get()) == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(source.get()));
  const auto end = static_cast<off_t>(size);
  if (::ftruncate(copy.get(), end) != 0) return ErrnoStatus(errno, "make " + to);
  off_t at = 0;
  while (true) {
    at = ::lseek(source.get(), at, SEEK_DATA);
    if (at < 0) return errno == ENXIO ? absl::OkStatus() : ErrnoStatus(errno, "read " + from);
    const off_t hole = ::lseek(source.get(), at, SEEK_HOLE);
    if (hole < 0) return ErrnoStatus(errno, "read " + from);
    off_t into = at;
    while (at < hole) {
      const ssize_t copied = ::copy_file_range(source.get(), &at, copy.get(), &into,
                                               static_cast<size_t>(hole - at), 0);
      if (copied < 0) return ErrnoStatus(errno, fmt::format("copy {} to {}", from, to));
      if (copied == 0) return absl::DataLossError(from + " became shorter");
    }
  }
}

}  // namespace lamina::backends
