// SPDX-License-Identifier: Apache-2.0
#include "backends/sandbox.h"

namespace lamina::backends {

std::string_view EndingName(ExecEnding ending) {
  switch (ending) {
    case ExecEnding::kExited:
      return "exited";
    case ExecEnding::kSignalled:
      return "signalled";
    case ExecEnding::kTimeLimit:
      return "time limit";
    case ExecEnding::kMemoryLimit:
      return "memory limit";
    case ExecEnding::kOutputLimit:
      return "output limit";
    case ExecEnding::kForbiddenCall:
      return "forbidden call";
    case ExecEnding::kCannotStart:
      return "cannot start";
    case ExecEnding::kSandboxDied:
      return "sandbox died";
  }
  return "unknown";
}

std::string_view ExecResult::Verdict() const {
  if (ending == ExecEnding::kExited) return exit_code == 0 ? "accepted" : "non-zero exit";
  if (ending == ExecEnding::kSandboxDied) return "internal error";
  return EndingName(ending);
}

int ExecResult::ShellCode() const {
  constexpr int kSignalBase = 128;
  return signal != 0 ? kSignalBase + signal : exit_code;
}

std::string_view StateName(SandboxState state) {
  switch (state) {
    case SandboxState::kRunning:
      return "running";
    case SandboxState::kPaused:
      return "paused";
    case SandboxState::kDead:
      return "dead";
  }
  return "unknown";
}

}  // namespace lamina::backends
