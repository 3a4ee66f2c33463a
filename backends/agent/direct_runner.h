// SPDX-License-Identifier: Apache-2.0
//
// Starts processes in the sandbox that this process is in, and reaps all of them, orphans included.
#ifndef LAMINA_BACKENDS_AGENT_DIRECT_RUNNER_H_
#define LAMINA_BACKENDS_AGENT_DIRECT_RUNNER_H_

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "backends/agent/runner.h"

namespace lamina::agent {

// How a process ended, as wait4(2) says.
struct Death {
  int status = 0;
  rusage usage{};
  std::chrono::steady_clock::time_point when;
};

struct DirectRunnerOptions {
  // Those that processes may have, as a set of bits (capabilities(7)); they lose all others for good.
  std::optional<uint64_t> capabilities;
  // The open cgroup.procs of a control group that processes are put into; may be invalid.
  UniqueFd group;
  // A group's memory.events (version 2), or empty. A process that is killed while its count of kills
  // rises has met the memory limit.
  std::string memory_events;
};

class DirectRunner : public Runner {
 public:
  // Starts a thread that lives as long as this process: there is one runner. Call it before other
  // threads are started: SIGCHLD must be blocked in all.
  static std::unique_ptr<DirectRunner> Start(DirectRunnerOptions options);

  absl::StatusOr<std::unique_ptr<Run>> Start(const ExecMessage& message, Streams streams) override;

  // For a Run: how its process ended, or nothing yet; with it the process is forgotten.
  std::optional<Death> Take(pid_t pid);
  // For a Run: a signal for its process, if that is there still.
  void Signal(pid_t pid, int signal);
  // Kills at the group's memory limit so far.
  uint64_t MemoryKills() const;

 private:
  explicit DirectRunner(DirectRunnerOptions options) : options_(std::move(options)) {}
  void Reap();

  struct Child {
    int ended = -1;  // eventfd of the Run, borrowed; -1: nobody waits
    std::optional<Death> death;
  };

  const DirectRunnerOptions options_;
  std::mutex mutex_;
  std::map<pid_t, Child> children_;
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_DIRECT_RUNNER_H_
