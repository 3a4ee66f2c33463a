// SPDX-License-Identifier: Apache-2.0
//
// What launchers ask a machine's monitor for: one request on a connection to its socket in the
// sandbox's directory, in frames as the agent has them (backends/agent/frame.h). The answer is kDone,
// with what there is to say, or kError.
#ifndef LAMINA_BACKENDS_VM_CONTROL_H_
#define LAMINA_BACKENDS_VM_CONTROL_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina::backends {

inline constexpr const char* kMachineSocket = "machine.sock";

// Frame types that the agent's protocol does not have.
enum class MachineCall : uint8_t {
  kState = 96,  // answered with one of the two below
  kPause = 97,  // both do nothing if it is so already
  kResume = 98,
  kSave = 99,  // into the directory that is the content: memory and disk, as they are at one moment
};
inline constexpr std::string_view kMachinePaused = "paused";
inline constexpr std::string_view kMachineRunning = "running";

// kUnavailable if there is no monitor: the machine has ended.
absl::StatusOr<std::string> CallMachine(const std::string& sandbox_directory, MachineCall call,
                                        std::string_view content = "");

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_VM_CONTROL_H_
