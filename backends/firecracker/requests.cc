// SPDX-License-Identifier: Apache-2.0
#include "backends/firecracker/requests.h"

#include <algorithm>

#include "backends/vm/machine.h"

namespace lamina::backends {
namespace {

constexpr uint64_t kMebibyte = 1 << 20;
// The first that is not the hypervisor's or the host's (vsock(7)).
constexpr unsigned kGuestCid = 3;

// "1 or an even number" of processors, and no more than 32.
unsigned ProcessorsOf(const MachinePlan& plan) {
  return plan.processors == 1 ? 1 : std::min(plan.processors + plan.processors % 2, 32U);
}

}  // namespace

std::vector<ApiRequest> BootRequests(const MachinePlan& plan) {
  std::vector<ApiRequest> requests = {
      {"PUT",
       "/machine-config",
       {{"vcpu_count", ProcessorsOf(plan)}, {"mem_size_mib", plan.memory_bytes / kMebibyte}}},
      {"PUT",
       "/boot-source",
       {{"kernel_image_path", plan.kernel.image},
        {"initrd_path", plan.initramfs},
        {"boot_args",
         fmt::format("console=ttyS0 quiet panic=-1 reboot=k random.trust_cpu=on {} lamina.vsock={}",
                     GuestParameters(plan), kAgentVsockPort)}}},
      {"PUT", "/vsock", {{"guest_cid", kGuestCid}, {"uds_path", kFirecrackerVsock}}},
      {"PUT",
       "/balloon",
       {{"amount_mib", 0}, {"deflate_on_oom", true}, {"free_page_reporting", plan.reclaim}}},
  };
  for (size_t index = 0; index < plan.pmem.size(); ++index) {
    const std::string id = fmt::format("pmem{}", index);
    requests.push_back({"PUT",
                        "/pmem/" + id,
                        {{"id", id},
                         {"path_on_host", plan.pmem[index].path},
                         {"root_device", false},
                         {"read_only", true}}});
  }
  if (!plan.disk.empty()) {
    requests.push_back({"PUT",
                        "/drives/disk",
                        {{"drive_id", "disk"},
                         {"path_on_host", kMachineDisk},
                         {"is_root_device", false},
                         {"is_read_only", false},
                         {"cache_type", "Writeback"}}});
  }
  requests.push_back({"PUT", "/actions", {{"action_type", "InstanceStart"}}});
  return requests;
}

std::vector<ApiRequest> LoadRequests(const std::string& snapshot) {
  return {{"PUT",
           "/snapshot/load",
           {{"snapshot_path", snapshot + "/" + kSnapshotState},
            {"mem_backend",
             {{"backend_type", "File"}, {"backend_path", snapshot + "/" + kSnapshotMemory}}},
            {"resume_vm", true},
            {"clock_realtime", true}}}};
}

}  // namespace lamina::backends
