// SPDX-License-Identifier: Apache-2.0
//
// Virtual machines that QEMU runs, with KVM or without. The image's metadata and layers are persistent
// memory of the machine, which its kernel mounts: their pages are the host's, and all machines share
// them.
#include "backends/qemu/command_line.h"
#include "backends/vm/accelerator.h"
#include "backends/vm/machine_backend.h"
#include "backends/vm/machine_plan.h"

namespace lamina::backends {
namespace {

class QemuBackend : public MachineBackend {
 public:
  std::string_view name() const override { return "qemu"; }
  std::string_view description() const override {
    return "a virtual machine (QEMU) with a kernel of its own";
  }
  absl::Status Available() const override {
    return CheckMachine(kQemuProgram, "the package qemu-system-x86");
  }
  std::string Note() const override;
  absl::Status Start(const StartRequest& request, Record& record) const override;
};

std::string QemuBackend::Note() const {
  const Accelerator accelerator = FindAccelerator();
  if (accelerator.reason.empty()) return "with KVM";
  return fmt::format("without KVM, and slow: {}", accelerator.reason);
}

absl::Status QemuBackend::Start(const StartRequest& request, Record& record) const {
  if (record.runtime.empty()) record.runtime = FindAccelerator().name;
  if (record.runtime != "kvm" && record.runtime != "tcg") {
    return absl::InvalidArgumentError(
        fmt::format("'{}' runs no machine: kvm and tcg do", record.runtime));
  }
  ASSIGN_OR_RETURN(const MachinePlan plan, PlanMachine(request, record));
  ASSIGN_OR_RETURN(const std::vector<std::string> command,
                   QemuCommandLine(plan, record.runtime, !request.snapshot.empty()));
  return StartMonitor(request, record, command);
}

}  // namespace

std::unique_ptr<Backend> MakeQemuBackend() { return std::make_unique<QemuBackend>(); }

}  // namespace lamina::backends
