// SPDX-License-Identifier: Apache-2.0
#include "backends/helper_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string_view>

#include "chunkstore/base/file.h"
#include "chunkstore/base/program.h"

namespace lamina::backends {
namespace {

constexpr size_t kMaxReason = 16 << 10;

// Becomes the helper, two processes away from this one: it is nobody's child here.
[[noreturn]] void Detach(const std::vector<char*>& words, std::vector<int> descriptors) {
  ::setsid();
  const pid_t helper = ::fork();
  if (helper != 0) ::_exit(helper > 0 ? 0 : 1);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  constexpr int kOutOfTheWay = 64;
  for (int& descriptor : descriptors) {
    descriptor = ::fcntl(descriptor, F_DUPFD_CLOEXEC, kOutOfTheWay);
  }
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, stream);
  int next = kFirstHelperDescriptor;
  for (const int descriptor : descriptors) ::dup2(descriptor, next++);
  // What whoever called the launcher left open is not the helper's to keep.
  ::syscall(SYS_close_range, next, ~0U, CLOSE_RANGE_CLOEXEC);
  std::ignore = ::chdir("/");
  ::execv(words[0], words.data());
  constexpr std::string_view kFailed = "cannot be executed";
  std::ignore = ::write(next - 2, kFailed.data(), kFailed.size());
  ::_exit(127);
}

}  // namespace

absl::Status StartHelper(const std::vector<std::string>& arguments,
                         const std::vector<int>& descriptors, int lock) {
  std::vector<char*> words;
  for (const std::string& argument : arguments) {
    words.push_back(const_cast<char*>(argument.c_str()));
  }
  words.push_back(nullptr);
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd ready(ends[0]);
  UniqueFd ready_there(ends[1]);
  std::vector<int> passed = descriptors;
  passed.push_back(ready_there.get());
  passed.push_back(lock);
  const pid_t child = ::fork();
  if (child < 0) return ErrnoStatus(errno, "fork");
  if (child == 0) Detach(words, std::move(passed));
  ready_there.Reset();
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  ASSIGN_OR_RETURN(const std::string reason, ReadToEnd(ready.get(), kMaxReason));
  if (reason.empty()) return absl::OkStatus();
  const std::string& path = arguments[0];
  return absl::InternalError(fmt::format("{}: {}", path.substr(path.rfind('/') + 1), reason));
}

}  // namespace lamina::backends
