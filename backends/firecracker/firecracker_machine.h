// SPDX-License-Identifier: Apache-2.0
//
// A machine that Firecracker runs: its monitor's side of it.
#ifndef LAMINA_BACKENDS_FIRECRACKER_FIRECRACKER_MACHINE_H_
#define LAMINA_BACKENDS_FIRECRACKER_FIRECRACKER_MACHINE_H_

#include <memory>
#include <string>
#include <vector>

#include "backends/firecracker/api.h"
#include "backends/vm/machine.h"

namespace lamina::backends {

// Starts `command` in the sandbox's directory, and makes the machine with `requests`. What Firecracker
// and the guest's console say goes to `output`.
absl::StatusOr<std::unique_ptr<Machine>> StartFirecrackerMachine(
    const std::vector<std::string>& command, const std::string& directory,
    const std::vector<ApiRequest>& requests, int output);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_FIRECRACKER_FIRECRACKER_MACHINE_H_
