// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/program.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "chunkstore/base/file.h"

extern char** environ;

namespace lamina {

namespace {

constexpr size_t kMaxSaid = 8 << 10;  // of what a program says, in an error

}  // namespace

absl::StatusOr<std::string> ReadToEnd(int fd, size_t most) {
  std::string text;
  std::array<char, 4096> piece;
  while (true) {
    const ssize_t got = ::read(fd, piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "read from a pipe");
    if (got == 0) return text;
    text.append(piece.data(), std::min(static_cast<size_t>(got), most - text.size()));
  }
}

absl::Status RunProgram(const std::vector<std::string>& words) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd output(ends[0]);
  UniqueFd input(ends[1]);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);

  // Not fork(2): the process may be large, and has threads.
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDWR, 0);
  ::posix_spawn_file_actions_adddup2(&actions, input.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, input.get(), STDERR_FILENO);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t child = 0;
  const int error =
      ::posix_spawnp(&child, arguments[0], &actions, &attributes, arguments.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error == ENOENT) {
    return absl::FailedPreconditionError(fmt::format("{} is not on PATH", words[0]));
  }
  if (error != 0) return ErrnoStatus(error, "run " + words[0]);

  input.Reset();
  std::string said = ReadToEnd(output.get(), kMaxSaid).value_or("");
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status == 0) return absl::OkStatus();
  while (said.ends_with('\n')) said.pop_back();
  return absl::InternalError(fmt::format("{}: {}", words[0], said));
}

absl::Status CopyTree(const std::string& from, const std::string& to) {
  return RunProgram({"cp", "--archive", "--preserve=xattr", "--reflink=auto", "--sparse=always",
                     "--no-target-directory", "--one-file-system", "--", from, to});
}

}  // namespace lamina
