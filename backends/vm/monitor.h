// SPDX-License-Identifier: Apache-2.0
//
// The process on the host that a virtual machine belongs to: it connects callers with the agent inside,
// does what launchers ask of the machine (control.h), and ends it when its time is over. If it ends, so
// does the machine.
#ifndef LAMINA_BACKENDS_VM_MONITOR_H_
#define LAMINA_BACKENDS_VM_MONITOR_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "backends/vm/machine.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {

struct MonitorOptions {
  std::string directory;             // of the sandbox: console.log and the machine's disk are there
  UniqueFd agent;                    // where callers of the agent connect
  UniqueFd control;                  // where launchers connect
  std::chrono::milliseconds ttl{0};  // since the agent was there; 0: none
  std::chrono::milliseconds idle_ttl{0};  // without a program that runs
  // How long a machine may take to boot.
  std::chrono::milliseconds boot_patience{180'000};
  // Starts the machine; what that and its console say goes to `output`.
  std::function<absl::StatusOr<std::unique_ptr<Machine>>(int output)> start;
  // Called when the agent is there.
  std::function<void()> ready;
};

// Serves the machine until it ends or its time is over; then the process is to end, with the threads that
// serve launchers. Errors before it was ready end with the last lines of its console.
absl::Status RunMonitor(MonitorOptions options);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_VM_MONITOR_H_
