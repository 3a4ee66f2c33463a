// SPDX-License-Identifier: Apache-2.0
//
// Virtual machines that Firecracker runs: like QEMU's, with less around them, and with KVM only.
#include "backends/firecracker/requests.h"
#include "backends/vm/accelerator.h"
#include "backends/vm/machine_backend.h"
#include "backends/vm/machine_plan.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

constexpr const char* kProgram = "firecracker";

class FirecrackerBackend : public MachineBackend {
 public:
  std::string_view name() const override { return "firecracker"; }
  std::string_view description() const override {
    return "a virtual machine (Firecracker) with a kernel of its own; needs KVM";
  }
  absl::Status Available() const override;
  absl::Status Start(const StartRequest& request, Record& record) const override;
};

absl::Status FirecrackerBackend::Available() const {
  if (const Accelerator accelerator = FindAccelerator(); accelerator.name != "kvm") {
    return absl::FailedPreconditionError(
        fmt::format("Firecracker needs KVM: {}", accelerator.reason));
  }
  return CheckMachine(kProgram, "it from its releases");
}

absl::Status FirecrackerBackend::Start(const StartRequest& request, Record& record) const {
  if (!record.runtime.empty() && record.runtime != "kvm") {
    return absl::InvalidArgumentError(
        fmt::format("'{}' runs no machine of Firecracker: kvm does", record.runtime));
  }
  record.runtime = "kvm";
  ASSIGN_OR_RETURN(const MachinePlan plan, PlanMachine(request, record));
  const std::vector<ApiRequest> requests =
      request.snapshot.empty() ? BootRequests(plan) : LoadRequests(request.snapshot);
  const std::string file = request.directory + "/firecracker.json";
  RETURN_IF_ERROR(
      WriteFileAtomically(file, SerializeRequests(requests), 0600, Durability::kCached));
  return StartMonitor(request, record, {kProgram, "--id", record.id, "--api-sock", kFirecrackerApi},
                      {"--firecracker=" + file});
}

}  // namespace

std::unique_ptr<Backend> MakeFirecrackerBackend() { return std::make_unique<FirecrackerBackend>(); }

}  // namespace lamina::backends
