// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/credential_helper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"

extern char** environ;

namespace lamina::registry {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxOutput = 64 << 10;
// How helpers say that they have nothing (docker-credential-helpers, credentials/error.go).
constexpr std::string_view kNotFound = "credentials not found";
// The user name that marks the secret as an identity token.
constexpr std::string_view kTokenUser = "<token>";

// A helper that runs. What it has started itself is in its process group, and ends with it if it does
// not come to an end by itself.
class Child {
 public:
  explicit Child(pid_t pid)
      : pid_(pid), ended_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {}
  Child(const Child&) = delete;
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(-pid_, SIGKILL);
    Wait();
  }
  // Readable once it has ended.
  int ended() const { return ended_.get(); }
  // The status as waitpid(2) has it.
  int Wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_;
  const UniqueFd ended_;
};

// What it says until it ends. The end of its output is no sign of that: it may close it before, and a
// process that it leaves behind may hold it open for ever.
absl::StatusOr<std::string> ReadAnswer(const Child& child, UniqueFd output,
                                       Clock::duration patience) {
  const Clock::time_point deadline = Clock::now() + patience;
  std::string answer;
  for (bool ended = false;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    std::array<pollfd, 2> events = {
        {{.fd = output.get(), .events = POLLIN}, {.fd = child.ended(), .events = POLLIN}}};
    const int ready = left > 0 ? ::poll(events.data(), events.size(), static_cast<int>(left)) : 0;
    if (ready == 0) return absl::DeadlineExceededError("it did not answer in time");
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) return ErrnoStatus(errno, "wait for its answer");
    if (events[0].revents == 0) {
      // It may have written between the look at its output and the one at itself.
      if (std::exchange(ended, true)) return answer;
      continue;
    }
    std::array<char, 4096> buffer;
    const ssize_t got = ::read(output.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "read its answer");
    if (got == 0) output.Reset();  // poll passes -1 over
    answer.append(buffer.data(), static_cast<size_t>(got));
    if (answer.size() > kMaxOutput) return absl::ResourceExhaustedError("its answer is too long");
  }
}

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

absl::StatusOr<Pipe> NewPipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return ErrnoStatus(errno, "create a pipe");
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

absl::StatusOr<pid_t> Start(const std::string& program, int input, int output) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  const char* arguments[] = {program.c_str(), "get", nullptr};
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, program.c_str(), &actions, &attributes,
                                   const_cast<char**>(arguments), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, "start it");
  return pid;
}

struct Outcome {
  std::string output;
  int status = 0;  // as waitpid(2) has it
};

absl::StatusOr<Outcome> Run(const std::string& program, std::string_view request,
                            Clock::duration patience) {
  ASSIGN_OR_RETURN(Pipe input, NewPipe());
  ASSIGN_OR_RETURN(Pipe output, NewPipe());
  // It fits any pipe, and is written while we have the other end as well: a helper need not read it.
  if (::write(input.write.get(), request.data(), request.size()) < 0) {
    return ErrnoStatus(errno, "write its request");
  }
  input.write.Reset();
  ASSIGN_OR_RETURN(const pid_t pid, Start(program, input.read.get(), output.write.get()));
  Child child(pid);
  if (child.ended() < 0) return ErrnoStatus(errno, "watch it");
  output.write.Reset();
  ASSIGN_OR_RETURN(std::string answer, ReadAnswer(child, std::move(output.read), patience));
  return Outcome{.output = std::move(answer), .status = child.Wait()};
}

std::string Describe(int status) {
  if (WIFSIGNALED(status)) return fmt::format("it was ended by signal {}", WTERMSIG(status));
  return fmt::format("it failed with exit status {}", WEXITSTATUS(status));
}

absl::StatusOr<std::optional<Credential>> Ask(const std::string& program, std::string_view registry,
                                              Clock::duration patience) {
  ASSIGN_OR_RETURN(const Outcome outcome, Run(program, registry, patience));
  // What it said is not repeated in errors: there may be a secret in it, even if it failed then.
  if (outcome.status != 0) {
    if (outcome.output.find(kNotFound) != std::string::npos) return std::optional<Credential>();
    return absl::UnavailableError(Describe(outcome.status));
  }
  const absl::StatusOr<nlohmann::json> value = oci::ParseJson(outcome.output, "answer");
  if (!value.ok()) return absl::InvalidArgumentError("its answer is not the JSON it should be");
  const oci::Field field(*value, "answer");
  ASSIGN_OR_RETURN(const std::string username, field.OptionalString("Username"));
  ASSIGN_OR_RETURN(const std::string secret, field.OptionalString("Secret"));
  if (secret.empty()) return std::optional<Credential>();
  if (username == kTokenUser) return Credential{.identity_token = secret};
  return Credential{.username = username, .password = secret};
}

}  // namespace

absl::StatusOr<std::optional<Credential>> AskHelper(const std::string& name,
                                                    std::string_view registry,
                                                    std::chrono::milliseconds patience) {
  const bool is_name = !name.empty() && name.find_first_of("/\n") == std::string::npos;
  if (!is_name || name.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(fmt::format("'{}' is no name of a credential helper", name));
  }
  const std::string program = "docker-credential-" + name;
  ASSIGN_OR_RETURN(std::optional<Credential> credential, Ask(program, registry, patience), "{}",
                   program);
  return credential;
}

}  // namespace lamina::registry
