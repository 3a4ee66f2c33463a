// SPDX-License-Identifier: Apache-2.0
//
// `lamina run` with a backend that is asked for.
#ifndef LAMINA_TOOLS_LAMINA_RUN_IN_SANDBOX_H_
#define LAMINA_TOOLS_LAMINA_RUN_IN_SANDBOX_H_

#include "tools/lamina/run.h"
#include "tools/lamina/sandbox_options.h"

namespace lamina::cli {

// Makes a sandbox of the image, runs the command in it, and removes it. Returns the program's exit
// code, as ExecInSandbox does.
absl::StatusOr<int> RunInSandbox(const ContainerOptions& options, const backends::Choice& choice,
                                 const SandboxFlags& flags, const ExecFlags& exec);

}  // namespace lamina::cli

#endif  // LAMINA_TOOLS_LAMINA_RUN_IN_SANDBOX_H_
