// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/program.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>

namespace lamina::agent {
namespace {

std::string_view PathOf(const std::vector<std::string>& environment) {
  constexpr std::string_view kName = "PATH=";
  for (const std::string& variable : environment) {
    if (variable.starts_with(kName)) return std::string_view(variable).substr(kName.size());
  }
  return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
}

}  // namespace

Program::Program(const ExecMessage& message) {
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

int Program::Execute() const {
  int error = ENOENT;
  for (const std::string& candidate : candidates_) {
    ::execve(candidate.c_str(), arguments_.data(), environment_.data());
    if (errno != ENOENT && errno != ENOTDIR) error = errno;
    if (errno != ENOENT && errno != ENOTDIR && errno != EACCES) break;
  }
  return error;
}

int TakeStreams(int in, int out, int err, int kept, int kept_as) {
  const std::array<int, 4> from{in, out, err, kept};
  const std::array<int, 4> to{STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO, kept_as};
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
  const int last_kept = high[3] >= 0 ? kept_as : STDERR_FILENO;
  if (last_kept > STDERR_FILENO + 1) {
    ::syscall(SYS_close_range, STDERR_FILENO + 1, last_kept - 1, CLOSE_RANGE_CLOEXEC);
  }
  if (::syscall(SYS_close_range, last_kept + 1, ~0U, CLOSE_RANGE_CLOEXEC) != 0) return errno;
  return 0;
}

}  // namespace lamina::agent
