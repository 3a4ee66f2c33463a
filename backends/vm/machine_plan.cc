// SPDX-License-Identifier: Apache-2.0
#include "backends/vm/machine_plan.h"

#include <fcntl.h>

#include <algorithm>

#include "backends/cgroup.h"
#include "backends/helper_process.h"
#include "backends/sandbox_directory.h"
#include "backends/vm/control.h"
#include "backends/vm/machine.h"
#include "fs/engine/socket.h"

namespace lamina::backends {
namespace {

constexpr uint64_t kMiB = 1 << 20;
// The host maps files of that alignment with large pages, and the guest's kernel takes no other ones.
constexpr uint64_t kPmemAlignment = 2 * kMiB;
constexpr uint64_t kDefaultMemory = 512 * kMiB;
// What the kernel and the agent take.
constexpr uint64_t kKernelMemory = 128 * kMiB;
// A kernel keeps 64 bytes for each page that it may map, of persistent memory as well.
constexpr uint64_t kPageShare = 4096 / 64;
constexpr uint64_t kMostProcessors = 64;

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

absl::StatusOr<PmemFile> LookAtPmem(const std::string& path) {
  ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(path, O_RDONLY));
  PmemFile pmem{.path = path};
  ASSIGN_OR_RETURN(pmem.bytes, FileSize(file.get()));
  if (pmem.bytes == 0 || pmem.bytes % kPmemAlignment != 0) {
    return absl::InternalError(
        fmt::format("{} has {} bytes, which is no multiple of 2 MiB", path, pmem.bytes));
  }
  return pmem;
}

}  // namespace

absl::StatusOr<MachinePlan> PlanMachine(const StartRequest& request, const Record& record) {
  MachinePlan plan{
      .name = record.id, .processes = record.limits.processes, .reclaim = record.reclaim};
  if (request.devices.empty()) {
    return absl::FailedPreconditionError(
        "virtual machines need an image that is mounted with transport erofs");
  }
  uint64_t pmem_bytes = 0;
  for (const std::string& path : request.devices) {
    ASSIGN_OR_RETURN(PmemFile pmem, LookAtPmem(path));
    pmem_bytes += pmem.bytes;
    plan.pmem.push_back(std::move(pmem));
  }
  ASSIGN_OR_RETURN(plan.kernel, FindGuestKernel());
  ASSIGN_OR_RETURN(plan.initramfs, GetInitramfs(plan.kernel, request.helpers + "/lamina-agent",
                                                request.state + "/guest"));
  const uint64_t limit = record.limits.memory_bytes;
  plan.program_bytes = RoundUp(limit > 0 ? limit : kDefaultMemory, kMiB);
  plan.memory_bytes =
      RoundUp(plan.program_bytes + kKernelMemory + pmem_bytes / kPageShare, kPmemAlignment);
  constexpr uint64_t kMillis = 1000;
  plan.processors = static_cast<unsigned>(std::clamp<uint64_t>(
      RoundUp(record.limits.cpu_millis, kMillis) / kMillis, 1, kMostProcessors));
  if (record.limits.disk_bytes > 0) {
    plan.disk = request.directory + "/" + kMachineDisk;
    if (request.snapshot.empty()) {
      RETURN_IF_ERROR(MakeDiskImage(plan.disk, record.limits.disk_bytes), "disk of {} bytes",
                      record.limits.disk_bytes);
    } else {
      RETURN_IF_ERROR(CopySparseFile(request.snapshot + "/" + kMachineDisk, plan.disk));
    }
  }
  return plan;
}

std::string GuestParameters(const MachinePlan& plan) {
  return fmt::format(
      "lamina.hostname={} lamina.layers={} lamina.upper={} lamina.memory={} lamina.processes={} "
      "lamina.reclaim={:d}",
      plan.name, plan.pmem.size() - 1, plan.disk.empty() ? "memory" : "disk", plan.program_bytes,
      plan.processes, plan.reclaim);
}

absl::Status StartMonitor(const StartRequest& request, const Record& record,
                          const std::vector<std::string>& command,
                          const std::vector<std::string>& monitor_options) {
  // Memory, processes and disk are limited by what the machine has.
  RETURN_IF_ERROR(Cgroup::Create(record.cgroup, {.cpu_millis = record.limits.cpu_millis}).status());
  ASSIGN_OR_RETURN(const UniqueFd control, fs::ListenUnix(request.directory, kMachineSocket));
  std::vector<std::string> arguments = {
      request.helpers + "/lamina-vm", "--directory=" + request.directory,
      "--cgroup=" + record.cgroup, fmt::format("--ttl-ms={}", record.ttl_ms),
      fmt::format("--idle-ttl-ms={}", record.idle_ttl_ms)};
  if (!request.snapshot.empty()) arguments.push_back("--snapshot=" + request.snapshot);
  arguments.insert(arguments.end(), monitor_options.begin(), monitor_options.end());
  arguments.emplace_back("--");
  arguments.insert(arguments.end(), command.begin(), command.end());
  RETURN_IF_ERROR(StartHelper(arguments, {request.listener, control.get()}, request.lock));
  return Cgroup::Create(record.cgroup, {.cpu_millis = record.limits.cpu_millis}).status();
}

}  // namespace lamina::backends
