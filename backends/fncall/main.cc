// SPDX-License-Identifier: Apache-2.0
//
// lamina-fncall: the pool of one sandbox for calls. Serves the agent's protocol on the listening socket
// that it was started with.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "backends/agent/server.h"
#include "backends/cgroup.h"
#include "backends/fncall/pool.h"

namespace lamina::fncall {
namespace {

// Ids of calls' processes on the host: far from what people and services have, one for each slot, so
// that what the kernel counts for a user is not shared between calls.
constexpr uint32_t kFirstHostUid = 0x70000000;
// What of a slot counts as processes besides the call's.
constexpr uint64_t kOwnProcesses = 2;

struct Options {
  int listen_fd = 3;
  int ready_fd = 4;
  int lock_fd = 5;
  std::string rootfs;
  std::string cgroup;
  uint32_t warm = 2;
  backends::Limits limits;
  uint64_t ttl_ms = 0;
  uint64_t idle_ttl_ms = 0;
};

absl::Status Serve(const Options& options) {
  ASSIGN_OR_RETURN(const Filter filter, Filter::Make());
  // Leaves of the tree: a group of version 2 that has processes can have no groups below it.
  ASSIGN_OR_RETURN(const backends::Cgroup group,
                   backends::Cgroup::Create(options.cgroup + "/pool", {}));
  RETURN_IF_ERROR(group.Add(::getpid()));
  constexpr uint64_t kDefaultTmp = 64 << 20;
  std::vector<SlotOptions> slots;
  std::vector<backends::Cgroup> groups;
  for (uint32_t slot = 0; slot < options.warm; ++slot) {
    SlotOptions slot_options{
        .jail = {.rootfs = options.rootfs,
                 .tmp_bytes =
                     options.limits.disk_bytes > 0 ? options.limits.disk_bytes : kDefaultTmp,
                 .host_uid = kFirstHostUid + slot,
                 .filter = &filter},
        .cgroup = fmt::format("{}/slot{}", options.cgroup, slot),
        .limits = options.limits};
    if (slot_options.limits.processes > 0) slot_options.limits.processes += kOwnProcesses;
    ASSIGN_OR_RETURN(backends::Cgroup slot_group, backends::Cgroup::Of(slot_options.cgroup));
    groups.push_back(std::move(slot_group));
    slots.push_back(std::move(slot_options));
  }
  ASSIGN_OR_RETURN(SlotStarter starter, SlotStarter::Start(std::move(slots)));
  ASSIGN_OR_RETURN(const std::unique_ptr<Pool> pool,
                   Pool::Start(std::move(starter), std::move(groups)));
  agent::Server server(UniqueFd(options.listen_fd), *pool,
                       {.ttl = std::chrono::milliseconds(options.ttl_ms),
                        .idle_ttl = std::chrono::milliseconds(options.idle_ttl_ms),
                        .sessions = false,
                        .files = false});
  ::close(options.lock_fd);
  ::close(options.ready_fd);
  const absl::Status done = server.Serve();
  // Threads may be at work still; slots and their jails end with this process.
  ::_exit(done.ok() ? 0 : 1);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("The pool of a sandbox for calls. Started by lamina, not by people.",
               "lamina-fncall");
  app.add_option("--listen-fd", options.listen_fd, "Listening unix socket");
  app.add_option("--ready-fd", options.ready_fd, "Closed when calls can be made; gets the error");
  app.add_option("--lock-fd", options.lock_fd, "Closed when calls can be made, before that");
  app.add_option("--rootfs", options.rootfs, "The mounted image")->required();
  app.add_option("--cgroup", options.cgroup, "Control group, below its root")->required();
  app.add_option("--warm", options.warm, "Calls at a time")->check(CLI::Range(1, 256));
  app.add_option("--memory-bytes", options.limits.memory_bytes, "Limit of a call");
  app.add_option("--cpu-millis", options.limits.cpu_millis, "Limit of a call");
  app.add_option("--processes", options.limits.processes, "Limit of a call");
  app.add_option("--disk-bytes", options.limits.disk_bytes, "Limit of a call");
  app.add_option("--ttl-ms", options.ttl_ms, "End after that time");
  app.add_option("--idle-ttl-ms", options.idle_ttl_ms, "End after that time without a call");
  CLI11_PARSE(app, argc, argv);
  ::signal(SIGPIPE, SIG_IGN);
  for (const int fd : {options.listen_fd, options.ready_fd, options.lock_fd}) {
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  const absl::Status done = Serve(options);
  const std::string text(done.message());
  std::ignore = ::write(options.ready_fd, text.data(), text.size());
  return 1;
}

}  // namespace
}  // namespace lamina::fncall

int main(int argc, char** argv) { return lamina::fncall::Main(argc, argv); }
