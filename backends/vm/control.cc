// SPDX-License-Identifier: Apache-2.0
#include "backends/vm/control.h"

#include "backends/agent/frame.h"
#include "backends/agent/messages.h"
#include "fs/engine/socket.h"

namespace lamina::backends {

absl::StatusOr<std::string> CallMachine(const std::string& sandbox_directory, MachineCall call,
                                        std::string_view content) {
  ASSIGN_OR_RETURN(const UniqueFd socket, fs::ConnectUnix(sandbox_directory, kMachineSocket));
  RETURN_IF_ERROR(agent::WriteFrame(socket.get(), static_cast<agent::FrameType>(call), content),
                  "machine");
  ASSIGN_OR_RETURN(agent::Frame answer, agent::ReadFrame(socket.get()), "machine");
  if (answer.type == agent::FrameType::kError) return agent::DecodeError(answer.content);
  if (answer.type != agent::FrameType::kDone) {
    return absl::DataLossError("machine: the monitor's answer is not understood");
  }
  return std::move(answer.content);
}

}  // namespace lamina::backends
