// SPDX-License-Identifier: Apache-2.0
//
// What backends whose sandboxes are virtual machines have in common.
#ifndef LAMINA_BACKENDS_VM_MACHINE_BACKEND_H_
#define LAMINA_BACKENDS_VM_MACHINE_BACKEND_H_

#include "backends/backend.h"

namespace lamina::backends {

class MachineBackend : public Backend {
 public:
  Capabilities capabilities() const override;
  absl::Status Pause(const std::string& directory, const Record& record) const override;
  absl::Status Resume(const std::string& directory, const Record& record) const override;
  bool Paused(const std::string& directory, const Record& record) const override;
  absl::Status Save(const std::string& directory, const std::string& into) const override;
  absl::StatusOr<uint64_t> DiskBytes(const std::string& directory) const override;

 protected:
  // Root, a kernel to boot, control groups, and the program on PATH.
  static absl::Status CheckMachine(const std::string& program, const std::string& package);
};

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_VM_MACHINE_BACKEND_H_
