// SPDX-License-Identifier: Apache-2.0
//
// Starts processes in the sandbox that this process is in, and reaps all of them, orphans included.
#ifndef LAMINA_BACKENDS_AGENT_DIRECT_RUNNER_H_
#define LAMINA_BACKENDS_AGENT_DIRECT_RUNNER_H_

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "backends/agent/runner.h"

namespace lamina::agent {

// How a process ended, as wait4(2) says.
struct Death {
  int status = 0;
  rusage usage{};
  std::chrono::steady_clock::time_point when;
};

class DirectRunner : public Runner {
 public:
  // `capabilities`: those that processes may have, as a set of bits (capabilities(7)); they lose all
  // others for good. Starts a thread that lives as long as this process: there is one runner.
  static std::unique_ptr<DirectRunner> Start(std::optional<uint64_t> capabilities);

  absl::StatusOr<std::unique_ptr<Run>> Start(const ExecMessage& message, Streams streams) override;

  // For a Run: how its process ended, or nothing yet; with it the process is forgotten.
  std::optional<Death> Take(pid_t pid);

 private:
  explicit DirectRunner(std::optional<uint64_t> capabilities) : capabilities_(capabilities) {}
  void Reap();

  struct Child {
    int ended = -1;  // eventfd of the Run, borrowed; -1: nobody waits
    std::optional<Death> death;
  };

  const std::optional<uint64_t> capabilities_;
  std::mutex mutex_;
  std::condition_variable forked_;
  uint64_t forks_ = 0;
  std::map<pid_t, Child> children_;
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_DIRECT_RUNNER_H_
