// SPDX-License-Identifier: Apache-2.0
//
// Stateless calls: a pool of warm jails (backends/fncall) on the image.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "backends/backend.h"
#include "backends/cgroup.h"

namespace lamina::backends {
namespace {

class FnCallBackend : public Backend {
 public:
  std::string_view name() const override { return "fncall"; }
  std::string_view description() const override {
    return "stateless calls in warm jails: namespaces, system call filter, control groups, no root";
  }
  Capabilities capabilities() const override { return {.call_files = true, .disk_limit = true}; }
  absl::Status Available() const override {
    if (::geteuid() != 0) return absl::FailedPreconditionError("calls need root to make jails");
    return Cgroup::Version().status();
  }
  absl::Status Start(const StartRequest& request, Record& record) const override;
};

// Becomes the pool, two processes away from this one: it is nobody's child here.
[[noreturn]] void Detach(const StartRequest& request, int ready, std::vector<char*> words) {
  ::setsid();
  const pid_t pool = ::fork();
  if (pool != 0) ::_exit(pool > 0 ? 0 : 1);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  constexpr int kListener = 3;
  constexpr int kReady = 4;
  constexpr int kOutOfTheWay = 16;
  const int listener = ::fcntl(request.listener, F_DUPFD_CLOEXEC, kOutOfTheWay);
  const int ready_there = ::fcntl(ready, F_DUPFD_CLOEXEC, kOutOfTheWay);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, stream);
  ::dup2(listener, kListener);
  ::dup2(ready_there, kReady);
  std::ignore = ::chdir("/");
  ::execv(words[0], words.data());
  constexpr std::string_view kFailed = "cannot be executed";
  std::ignore = ::write(kReady, kFailed.data(), kFailed.size());
  ::_exit(127);
}

absl::Status FnCallBackend::Start(const StartRequest& request, Record& record) const {
  const std::vector<std::string> arguments = {
      request.helpers + "/lamina-fncall",
      "--rootfs=" + request.rootfs,
      "--cgroup=" + record.cgroup,
      fmt::format("--warm={}", request.warm),
      fmt::format("--memory-bytes={}", record.limits.memory_bytes),
      fmt::format("--cpu-millis={}", record.limits.cpu_millis),
      fmt::format("--processes={}", record.limits.processes),
      fmt::format("--disk-bytes={}", record.limits.disk_bytes),
      fmt::format("--ttl-ms={}", record.ttl_ms),
      fmt::format("--idle-ttl-ms={}", record.idle_ttl_ms),
  };
  std::vector<char*> words;
  for (const std::string& argument : arguments)
    words.push_back(const_cast<char*>(argument.c_str()));
  words.push_back(nullptr);
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd ready(ends[0]);
  UniqueFd ready_there(ends[1]);
  const pid_t child = ::fork();
  if (child < 0) return ErrnoStatus(errno, "fork");
  if (child == 0) Detach(request, ready_there.get(), std::move(words));
  ready_there.Reset();
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  std::array<char, 2048> text{};
  ssize_t got = 0;
  do {
    got = ::read(ready.get(), text.data(), text.size());
  } while (got < 0 && errno == EINTR);
  if (got > 0) {
    return absl::InternalError(
        fmt::format("lamina-fncall: {}", std::string_view(text.data(), static_cast<size_t>(got))));
  }
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<Backend> MakeFnCallBackend() { return std::make_unique<FnCallBackend>(); }

}  // namespace lamina::backends
