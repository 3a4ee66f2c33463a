// SPDX-License-Identifier: Apache-2.0
//
// lamina-vm: the monitor of one virtual machine (monitor.h).
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "backends/cgroup.h"
#include "backends/firecracker/firecracker_machine.h"
#include "backends/qemu/qemu_machine.h"
#include "backends/vm/monitor.h"

namespace lamina::backends {
namespace {

// As StartHelper gives them.
constexpr int kAgentListener = 3;
constexpr int kControlListener = 4;
constexpr int kReady = 5;
constexpr int kLock = 6;

absl::StatusOr<std::unique_ptr<Machine>> StartFirecracker(const std::vector<std::string>& command,
                                                          const std::string& directory,
                                                          const std::string& file, int output) {
  constexpr uint64_t kMaxRequests = 1 << 20;
  ASSIGN_OR_RETURN(const std::string text, ReadFileToString(file, kMaxRequests));
  ASSIGN_OR_RETURN(const std::vector<ApiRequest> requests, ParseRequests(text));
  return StartFirecrackerMachine(command, directory, requests, output);
}

int Main(int argc, char** argv) {
  std::string directory;
  std::string cgroup;
  std::string snapshot;
  uint64_t ttl_ms = 0;
  uint64_t idle_ttl_ms = 0;
  std::string firecracker;
  std::vector<std::string> command;
  CLI::App app("The monitor of a virtual machine. Started by lamina, not by people.", "lamina-vm");
  app.add_option("--directory", directory, "Of the sandbox")->required();
  app.add_option("--cgroup", cgroup, "Control group, below its root")->required();
  app.add_option("--snapshot", snapshot, "Directory with the memory to start from");
  app.add_option("--ttl-ms", ttl_ms, "End after that time");
  app.add_option("--idle-ttl-ms", idle_ttl_ms, "End after that time without a program");
  app.add_option("--firecracker", firecracker, "File with the requests for Firecracker");
  app.add_option("command", command, "QEMU's or Firecracker's command line, after --")->required();
  CLI11_PARSE(app, argc, argv);
  ::signal(SIGPIPE, SIG_IGN);
  RaiseDescriptorLimit();
  for (const int fd : {kAgentListener, kControlListener, kReady, kLock}) {
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  UniqueFd ready(kReady);
  UniqueFd lock(kLock);
  std::ignore = ::chdir(directory.c_str());  // for names of files in it
  const absl::StatusOr<Cgroup> group = Cgroup::Of(cgroup);
  absl::Status status = group.ok() ? group->Add(::getpid()) : group.status();
  if (status.ok()) {
    status =
        RunMonitor({.directory = directory,
                    .agent = UniqueFd(kAgentListener),
                    .control = UniqueFd(kControlListener),
                    .ttl = std::chrono::milliseconds(ttl_ms),
                    .idle_ttl = std::chrono::milliseconds(idle_ttl_ms),
                    .start =
                        [&](int output) {
                          return firecracker.empty()
                                     ? StartQemuMachine(command, snapshot, output)
                                     : StartFirecracker(command, directory, firecracker, output);
                        },
                    .ready =
                        [&] {
                          lock.Reset();
                          ready.Reset();
                        }});
  }
  // The machine has ended; threads that serve callers go with the process.
  const std::string text(status.message());
  if (!status.ok() && ready.valid()) {
    std::ignore = ::write(ready.get(), text.data(), text.size());
  }
  ::_exit(status.ok() ? 0 : 1);
}

}  // namespace
}  // namespace lamina::backends

int main(int argc, char** argv) { return lamina::backends::Main(argc, argv); }
