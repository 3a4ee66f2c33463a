// SPDX-License-Identifier: Apache-2.0
//
// Times `lamina mount` from its start to its end, and to the first byte that `ls -R` of the mount
// prints. Leaves the mount there. Prints JSON: {"mount_ms": ..., "first_byte_ms": ...}
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"

extern char** environ;

namespace lamina::bench {
namespace {

using Clock = std::chrono::steady_clock;

double MillisecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Starts a program with `output` (if not negative) as its standard output.
absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& command, int output) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  if (output >= 0) ::posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  pid_t child = -1;
  const int error =
      ::posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, "start " + command[0]);
  return child;
}

absl::StatusOr<int> Wait(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return ErrnoStatus(errno, "waitpid");
  }
  return status;
}

absl::Status RunCommand(const std::vector<std::string>& command) {
  // Standard output here is for the result.
  ASSIGN_OR_RETURN(const pid_t child, Spawn(command, STDERR_FILENO));
  ASSIGN_OR_RETURN(const int status, Wait(child));
  if (status == 0) return absl::OkStatus();
  return absl::InternalError(fmt::format("{} ended with status {:#x}", command[0], status));
}

// Returns when `ls -R` has printed a byte; it is not read any further.
absl::Status WaitForListing(const std::string& directory) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  ASSIGN_OR_RETURN(const pid_t child, Spawn({"ls", "-R", directory}, write_end.get()));
  write_end.Reset();
  char byte = 0;
  const ssize_t got = ::read(read_end.get(), &byte, 1);
  read_end.Reset();
  RETURN_IF_ERROR(Wait(child).status());
  if (got == 1) return absl::OkStatus();
  return absl::DataLossError(fmt::format("ls -R {} printed nothing", directory));
}

absl::StatusOr<nlohmann::json> TimeMount(const std::vector<std::string>& command,
                                         const std::string& directory) {
  const Clock::time_point start = Clock::now();
  RETURN_IF_ERROR(RunCommand(command));
  const double mount = MillisecondsSince(start);
  RETURN_IF_ERROR(WaitForListing(directory));
  return nlohmann::json{{"mount_ms", mount}, {"first_byte_ms", MillisecondsSince(start)}};
}

int Main(int argc, char** argv) {
  CLI::App app("Times a mount up to the first byte of ls -R.");
  std::string directory;
  std::vector<std::string> command;
  app.add_option("directory", directory, "Where the command mounts")->required();
  app.add_option("command", command, "The command that mounts, after --")->required();
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<nlohmann::json> result = TimeMount(command, directory);
  if (!result.ok()) {
    fmt::print(stderr, "mount_bench: {}\n", std::string(result.status().message()));
    return 1;
  }
  fmt::print("{}\n", result->dump());
  return 0;
}

}  // namespace
}  // namespace lamina::bench

int main(int argc, char** argv) { return lamina::bench::Main(argc, argv); }
