// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/credential_helper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"

extern char** environ;

namespace lamina::registry {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPatience = std::chrono::seconds(30);
constexpr size_t kMaxOutput = 64 << 10;
// How helpers say that they have nothing (docker-credential-helpers, credentials/error.go).
constexpr std::string_view kNotFound = "credentials not found";
// The user name that marks the secret as an identity token.
constexpr std::string_view kTokenUser = "<token>";

// Ends the child, whatever it is doing.
class Child {
 public:
  explicit Child(pid_t pid) : pid_(pid) {}
  Child(const Child&) = delete;
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    Wait();
  }
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
};

absl::StatusOr<std::string> ReadAnswer(int fd) {
  const Clock::time_point deadline = Clock::now() + kPatience;
  std::string answer;
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd event = {.fd = fd, .events = POLLIN};
    const int ready = left > 0 ? ::poll(&event, 1, static_cast<int>(left)) : 0;
    if (ready == 0) return absl::DeadlineExceededError("it did not answer in time");
    char buffer[4096];
    const ssize_t got = ready < 0 ? -1 : ::read(fd, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "read its answer");
    if (got == 0) return answer;
    answer.append(buffer, static_cast<size_t>(got));
    if (answer.size() > kMaxOutput) return absl::ResourceExhaustedError("its answer is too long");
  }
}

absl::StatusOr<std::string> Run(const std::string& program, std::string_view input, bool* success) {
  // One socket is both its standard input and output. The request fits any socket buffer.
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return ErrnoStatus(errno, "create a pair of sockets");
  }
  const UniqueFd ours(sockets[0]);
  UniqueFd theirs(sockets[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDOUT_FILENO);
  const char* arguments[] = {program.c_str(), "get", nullptr};
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, program.c_str(), &actions, nullptr,
                                   const_cast<char**>(arguments), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, "start it");
  Child child(pid);
  theirs.Reset();
  if (::send(ours.get(), input.data(), input.size(), MSG_NOSIGNAL) < 0) {
    return ErrnoStatus(errno, "write its request");
  }
  ::shutdown(ours.get(), SHUT_WR);
  ASSIGN_OR_RETURN(std::string answer, ReadAnswer(ours.get()));
  const int status = child.Wait();
  *success = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return answer;
}

absl::StatusOr<std::optional<Credential>> Ask(const std::string& program,
                                              std::string_view registry) {
  bool success = false;
  ASSIGN_OR_RETURN(const std::string answer, Run(program, registry, &success));
  if (!success) {
    if (answer.find(kNotFound) != std::string::npos) return std::optional<Credential>();
    return absl::UnavailableError(fmt::format("it failed: {}", answer.substr(0, 500)));
  }
  // The answer is not repeated in errors: it has a secret in it.
  const absl::StatusOr<nlohmann::json> value = oci::ParseJson(answer, "answer");
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
                                                    std::string_view registry) {
  const bool is_name = !name.empty() && name.find_first_of("/\n") == std::string::npos;
  if (!is_name || name.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(fmt::format("'{}' is no name of a credential helper", name));
  }
  const std::string program = "docker-credential-" + name;
  ASSIGN_OR_RETURN(std::optional<Credential> credential, Ask(program, registry), "{}", program);
  return credential;
}

}  // namespace lamina::registry
