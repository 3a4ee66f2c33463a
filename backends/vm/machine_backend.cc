// SPDX-License-Identifier: Apache-2.0
#include "backends/vm/machine_backend.h"

#include <sys/stat.h>
#include <unistd.h>

#include "backends/cgroup.h"
#include "backends/crun.h"
#include "backends/vm/control.h"
#include "backends/vm/guest_kernel.h"
#include "backends/vm/machine.h"

namespace lamina::backends {

Capabilities MachineBackend::capabilities() const {
  return {.sessions = true,
          .files = true,
          .pause = true,
          .disk_snapshot = true,
          .memory_snapshot = true,
          .own_kernel = true,
          .root = true,
          .disk_limit = true};
}

absl::Status MachineBackend::CheckMachine(const std::string& program, const std::string& package) {
  if (::geteuid() != 0) return absl::FailedPreconditionError("virtual machines need root");
  if (!IsOnPath(program)) {
    return absl::FailedPreconditionError(
        fmt::format("{} is not on PATH: install {}", program, package));
  }
  RETURN_IF_ERROR(FindGuestKernel().status());
  return Cgroup::Version().status();
}

absl::Status MachineBackend::Pause(const std::string& directory, const Record&) const {
  return CallMachine(directory, MachineCall::kPause).status();
}

absl::Status MachineBackend::Resume(const std::string& directory, const Record&) const {
  return CallMachine(directory, MachineCall::kResume).status();
}

bool MachineBackend::Paused(const std::string& directory, const Record&) const {
  const absl::StatusOr<std::string> state = CallMachine(directory, MachineCall::kState);
  return state.ok() && *state == kMachinePaused;
}

absl::Status MachineBackend::Save(const std::string& directory, const std::string& into) const {
  return CallMachine(directory, MachineCall::kSave, into).status();
}

absl::StatusOr<uint64_t> MachineBackend::DiskBytes(const std::string& directory) const {
  constexpr uint64_t kBlock = 512;
  struct stat info {};
  if (::stat((directory + "/" + kMachineDisk).c_str(), &info) != 0) return 0;
  return static_cast<uint64_t>(info.st_blocks) * kBlock;
}

}  // namespace lamina::backends
