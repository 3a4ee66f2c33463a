// SPDX-License-Identifier: Apache-2.0
//
// QEMU's command line for a sandbox.
#ifndef LAMINA_BACKENDS_QEMU_COMMAND_LINE_H_
#define LAMINA_BACKENDS_QEMU_COMMAND_LINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "backends/vm/machine_plan.h"
#include "chunkstore/base/status.h"

namespace lamina::backends {

inline constexpr const char* kQemuProgram = "qemu-system-x86_64";

// The command line; with `incoming` for a machine that waits for its memory. kInvalidArgument for more
// devices than there are places.
absl::StatusOr<std::vector<std::string>> QemuCommandLine(const MachinePlan& plan,
                                                         const std::string& accelerator,
                                                         bool incoming);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_QEMU_COMMAND_LINE_H_
