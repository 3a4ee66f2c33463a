// SPDX-License-Identifier: Apache-2.0
//
// What a machine's first process finds its devices with: there is no udev.
#ifndef LAMINA_BACKENDS_AGENT_GUEST_DEVICES_H_
#define LAMINA_BACKENDS_AGENT_GUEST_DEVICES_H_

#include <cstddef>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"

namespace lamina::agent {

// Loads all kernel modules of a directory, in the order of their names. Those that are there already
// do no harm.
absl::Status LoadModules(const std::string& directory);

// The machine's persistent memory devices ("/dev/pmem2", ...) in the order of their places on its bus,
// which is the one that it was given them in: their numbers depend on which was ready first. Waits
// until there are `count`.
absl::StatusOr<std::vector<std::string>> FindPmemDevices(size_t count);

// Opens the serial port of that name.
absl::StatusOr<UniqueFd> OpenSerialPort(const std::string& name);

// The value of "KEY=value" in the kernel's command line; empty if it is not there.
std::string KernelParameter(const std::string& key);

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_GUEST_DEVICES_H_
