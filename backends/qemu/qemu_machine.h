// SPDX-License-Identifier: Apache-2.0
//
// A machine that QEMU runs: its monitor's side of it.
#ifndef LAMINA_BACKENDS_QEMU_QEMU_MACHINE_H_
#define LAMINA_BACKENDS_QEMU_QEMU_MACHINE_H_

#include <memory>
#include <string>
#include <vector>

#include "backends/vm/machine.h"

namespace lamina::backends {

// The descriptors that QEMU's command line names.
inline constexpr int kQemuAgentDescriptor = 3;
inline constexpr int kQemuQmpDescriptor = 4;

// Starts `arguments`, QEMU's command line. If `snapshot` is not empty it waits for the memory of a
// machine ("-incoming defer"), which is in that directory. What QEMU and the guest's console say goes to
// `output`.
absl::StatusOr<std::unique_ptr<Machine>> StartQemuMachine(const std::vector<std::string>& arguments,
                                                          const std::string& snapshot, int output);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_QEMU_QEMU_MACHINE_H_
