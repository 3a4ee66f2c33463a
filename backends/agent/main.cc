// SPDX-License-Identifier: Apache-2.0
//
// lamina-agent: the first process of a sandbox. It serves its protocol on a listening socket that it
// was started with, and ends when a time to live is over; the kernel then ends all else. Started as
// /init it is the first process of a virtual machine (guest.h). With --exec it becomes a program, or
// says why it cannot: OCI runtimes do not tell that from the program's own exit code 1.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>

#include "backends/agent/direct_runner.h"
#include "backends/agent/guest.h"
#include "backends/agent/program.h"
#include "backends/agent/server.h"

namespace lamina::agent {
namespace {

constexpr const char* kUsage =
    "usage: lamina-agent --listen-fd=N [--ttl-ms=N] [--idle-ttl-ms=N] [--capabilities=HEX]\n"
    "                    [--group-fd=N]\n"
    "       lamina-agent --exec PROGRAM [ARGUMENT...]\n"
    "\n"
    "Serves processes, sessions and files of the sandbox it is started in. It is started by\n"
    "lamina, not by people.\n"
    "\n"
    "  --listen-fd=N       the listening unix socket, open in descriptor N\n"
    "  --ttl-ms=N          end after that time\n"
    "  --idle-ttl-ms=N     end after that time without a process it runs\n"
    "  --capabilities=HEX  the capabilities that processes keep, as /proc/PID/status has them\n"
    "  --group-fd=N        the cgroup.procs of the group that processes go to, open for writing\n"
    "  --exec              become PROGRAM; if that fails, say why and end with 127 (it is not "
    "there)\n"
    "                      or 126\n";

struct Options {
  int listen_fd = -1;
  int group_fd = -1;
  ServerOptions server{.only_outside_peers = true};
  std::optional<uint64_t> capabilities;
};

std::optional<uint64_t> Number(std::string_view text, int base) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<Options> Parse(int argc, char** argv) {
  Options options;
  for (int index = 1; index < argc; ++index) {
    const std::string_view argument = argv[index];
    const size_t equals = argument.find('=');
    if (equals == std::string_view::npos) return std::nullopt;
    const std::string_view name = argument.substr(0, equals);
    const std::optional<uint64_t> value =
        Number(argument.substr(equals + 1), name == "--capabilities" ? 16 : 10);
    constexpr uint64_t kMost = uint64_t{1} << 50;
    if (!value.has_value() || (name != "--capabilities" && *value > kMost)) return std::nullopt;
    if (name == "--listen-fd") {
      options.listen_fd = static_cast<int>(*value);
    } else if (name == "--group-fd") {
      options.group_fd = static_cast<int>(*value);
    } else if (name == "--ttl-ms") {
      options.server.ttl = std::chrono::milliseconds(*value);
    } else if (name == "--idle-ttl-ms") {
      options.server.idle_ttl = std::chrono::milliseconds(*value);
    } else if (name == "--capabilities") {
      options.capabilities = value;
    } else {
      return std::nullopt;
    }
  }
  if (options.listen_fd < 0) return std::nullopt;
  return options;
}

int Execute(char** words) {
  ExecMessage message;
  message.working_directory.clear();
  for (; *words != nullptr; ++words) message.arguments.emplace_back(*words);
  for (char** variable = environ; *variable != nullptr; ++variable) {
    message.environment.emplace_back(*variable);
  }
  const int error = Program(message).Execute().error;
  std::fprintf(stderr, "lamina: %s: %s\n", message.arguments[0].c_str(), std::strerror(error));
  return ExitCodeFor(error);
}

int Main(int argc, char** argv) {
  if (argc > 2 && std::string_view(argv[1]) == "--exec") return Execute(argv + 2);
  const std::optional<Options> options = Parse(argc, argv);
  if (!options.has_value()) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  // Nobody inside may trace it, or open its descriptors or memory in /proc (ptrace(2), proc(5)).
  ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
  ::signal(SIGPIPE, SIG_IGN);
  ::fcntl(options->listen_fd, F_SETFD, FD_CLOEXEC);
  if (options->group_fd >= 0) ::fcntl(options->group_fd, F_SETFD, FD_CLOEXEC);
  const std::unique_ptr<DirectRunner> runner = DirectRunner::Start(
      {.capabilities = options->capabilities, .group = UniqueFd(options->group_fd)});
  Server server(UniqueFd(options->listen_fd), *runner, options->server);
  const absl::Status done = server.Serve();
  if (!done.ok()) std::fprintf(stderr, "lamina-agent: %s\n", done.ToString().c_str());
  std::fflush(stderr);
  // Other threads may be at work, and go with the process.
  ::_exit(done.ok() ? 0 : 1);
}

}  // namespace
}  // namespace lamina::agent

int main(int argc, char** argv) {
  if (argc > 0 && argv[0] == lamina::agent::kGuestInit) lamina::agent::RunGuest();
  return lamina::agent::Main(argc, argv);
}
