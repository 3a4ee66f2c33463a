// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/program.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <tuple>

namespace lamina::agent {
namespace {

std::string_view PathOf(const std::vector<std::string>& environment) {
  constexpr std::string_view kName = "PATH=";
  for (const std::string& variable : environment) {
    if (variable.starts_with(kName)) return std::string_view(variable).substr(kName.size());
  }
  return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
}

// Makes these the standard streams and closes all other descriptors, but for that of the state, at exec.
int TakeStreams(const Streams& streams) {
  const std::array<int, 4> from{streams.in.get(), streams.out.get(), streams.err.get(),
                                streams.state.get()};
  const std::array<int, 4> to{STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO, kStateDescriptor};
  std::array<int, 4> high{};
  // Out of the way first: one may have the number that another one gets.
  constexpr int kOutOfTheWay = 64;
  for (size_t index = 0; index < from.size(); ++index) {
    if (from[index] < 0) {
      high[index] = -1;
      continue;
    }
    high[index] = ::fcntl(from[index], F_DUPFD_CLOEXEC, kOutOfTheWay);
    if (high[index] < 0) return errno;
  }
  for (size_t index = 0; index < to.size(); ++index) {
    if (high[index] >= 0 && ::dup2(high[index], to[index]) < 0) return errno;
  }
  const int last_kept = high[3] >= 0 ? kStateDescriptor : STDERR_FILENO;
  if (last_kept > STDERR_FILENO + 1) {
    ::syscall(SYS_close_range, STDERR_FILENO + 1, last_kept - 1, CLOSE_RANGE_CLOEXEC);
  }
  if (::syscall(SYS_close_range, last_kept + 1, ~0U, CLOSE_RANGE_CLOEXEC) != 0) return errno;
  return 0;
}

// SIGXCPU and SIGXFSZ at the first limit; SIGKILL a second later for those who ignore that.
void LimitResource(int resource, rlim_t limit, rlim_t more) {
  if (limit == 0) return;
  const rlimit both{.rlim_cur = limit, .rlim_max = limit + more};
  ::setrlimit(static_cast<__rlimit_resource>(resource), &both);
}

uint64_t Microseconds(const timeval& time) {
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000 + static_cast<uint64_t>(time.tv_usec);
}

}  // namespace

void SetCannotStart(const StartFailure& failure, EndedMessage& ended) {
  ended.ending = Ending::kCannotStart;
  ended.code = failure.error;
  ended.detail = fmt::format("{}{}", failure.of_directory ? "working directory: " : "",
                             std::strerror(failure.error));
}

int ExitCodeFor(int error) { return error == ENOENT || error == ENOTDIR ? 127 : 126; }

void GivePipesTo(uid_t user, gid_t group) {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO, kStateDescriptor}) {
    struct stat info {};
    // What closes at exec has the number by chance.
    const int flags = ::fcntl(stream, F_GETFD);
    if (flags < 0 || (flags & FD_CLOEXEC) != 0 || ::fstat(stream, &info) != 0) continue;
    if (S_ISFIFO(info.st_mode)) std::ignore = ::fchown(stream, user, group);
  }
}

uint64_t ProcessorTime(const rusage& usage) {
  return Microseconds(usage.ru_utime) + Microseconds(usage.ru_stime);
}

Program::Program(const ExecMessage& message) : message_(message) {
  const std::string& name = message.arguments[0];
  if (name.find('/') != std::string::npos) {
    candidates_.push_back(name);
  } else if (!name.empty()) {
    std::string_view rest = PathOf(message.environment);
    while (true) {
      const size_t end = rest.find(':');
      // An empty part is the working directory.
      const std::string_view directory = rest.substr(0, end);
      candidates_.push_back(directory.empty() ? name : fmt::format("{}/{}", directory, name));
      if (end == std::string_view::npos) break;
      rest.remove_prefix(end + 1);
    }
  }
  for (const std::string& text : message.arguments) {
    arguments_.push_back(const_cast<char*>(text.c_str()));
  }
  for (const std::string& text : message.environment) {
    environment_.push_back(const_cast<char*>(text.c_str()));
  }
  arguments_.push_back(nullptr);
  environment_.push_back(nullptr);
}

int Program::TakeOver(const Streams& streams) const {
  ::setsid();
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  // Whoever started the sandbox may ignore some, and its starter does.
  for (int signal = 1; signal < NSIG; ++signal) ::signal(signal, SIG_DFL);
  const int taken = TakeStreams(streams);
  if (taken != 0) return taken;
  // What starts it is kept from being killed for want of memory; it is not.
  const int score = ::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (score >= 0) std::ignore = ::write(score, "0", 1);
  LimitResource(RLIMIT_CPU, (message_.cpu_ms + 999) / 1000, 1);
  LimitResource(RLIMIT_FSIZE, message_.file_limit, 0);
  return 0;
}

StartFailure Program::Execute() const {
  const std::string& directory = message_.working_directory;
  if (!directory.empty() && ::chdir(directory.c_str()) != 0) return {errno, /*of_directory=*/true};
  // Of the candidate in PATH that was nearest to running.
  int error = ENOENT;
  for (const std::string& candidate : candidates_) {
    ::execve(candidate.c_str(), arguments_.data(), environment_.data());
    if (errno != ENOENT && errno != ENOTDIR) error = errno;
    if (errno != ENOENT && errno != ENOTDIR && errno != EACCES) break;
  }
  return {.error = error};
}

void Program::Fail(const StartFailure& failure, int failure_pipe) {
  std::ignore = ::write(failure_pipe, &failure, sizeof(failure));
  ::_exit(127);
}

}  // namespace lamina::agent
