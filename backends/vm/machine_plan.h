// SPDX-License-Identifier: Apache-2.0
//
// What a sandbox's virtual machine consists of, whatever runs it.
#ifndef LAMINA_BACKENDS_VM_MACHINE_PLAN_H_
#define LAMINA_BACKENDS_VM_MACHINE_PLAN_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backends/backend.h"
#include "backends/record.h"
#include "backends/vm/guest_kernel.h"
#include "chunkstore/base/status.h"

namespace lamina::backends {

// A file of persistent memory.
struct PmemFile {
  std::string path;
  uint64_t bytes = 0;  // a multiple of 2 MiB
};

struct MachinePlan {
  std::string name;
  GuestKernel kernel;
  std::string initramfs;
  std::vector<PmemFile> pmem;  // the image's metadata, then its layers
  std::string disk;            // the file of what is written; empty: it is kept in memory
  uint64_t memory_bytes = 0;   // of the machine
  uint64_t program_bytes = 0;  // of that what programs may have
  uint64_t processes = 0;      // 0: no limit
  unsigned processors = 1;
  bool reclaim = true;
};

// Looks at what the launcher has mounted, and makes the disk if there is a limit of it (of a snapshot: a
// copy of that one's).
absl::StatusOr<MachinePlan> PlanMachine(const StartRequest& request, const Record& record);

// What the agent's kernel is told (backends/agent/guest.h).
std::string GuestParameters(const MachinePlan& plan);

// Makes the sandbox's control group and starts the monitor of its machine (lamina-vm), which runs
// `command`; returns when the agent is there.
absl::Status StartMonitor(const StartRequest& request, const Record& record,
                          const std::vector<std::string>& command,
                          const std::vector<std::string>& monitor_options = {});

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_VM_MACHINE_PLAN_H_
