// SPDX-License-Identifier: Apache-2.0
#include "tools/lamina/run_in_sandbox.h"

#include <memory>

#include "backends/launcher.h"
#include "chunkstore/base/signals.h"
#include "fs/image/image.h"

namespace lamina::cli {

absl::StatusOr<int> RunInSandbox(const ContainerOptions& options, const backends::Choice& choice,
                                 const SandboxFlags& flags, const ExecFlags& exec) {
  if (!options.writable_dir.empty()) {
    return UsageError(absl::InvalidArgumentError("--writable-dir is for --backend=container"));
  }
  ASSIGN_OR_RETURN(backends::SandboxOptions sandbox_options, ToSandboxOptions(flags));
  ASSIGN_OR_RETURN(sandbox_options.image, AbsoluteReference(options.image));
  sandbox_options.layers = options.layers;
  RETURN_IF_ERROR(MakeAbsolute(sandbox_options.layers));
  ASSIGN_OR_RETURN(sandbox_options.registry, ToSettings(options.registry));
  sandbox_options.warm = 1;
  ASSIGN_OR_RETURN(const fs::Image image,
                   fs::OpenImage(sandbox_options.image, oci::Platform::Host(),
                                 {.settings = sandbox_options.registry}),
                   "run {}", options.image);
  backends::ExecRequest request{.arguments = image.config.entrypoint};
  const std::vector<std::string>& command =
      options.command.empty() ? image.config.command : options.command;
  request.arguments.insert(request.arguments.end(), command.begin(), command.end());
  if (request.arguments.empty()) {
    return absl::InvalidArgumentError(
        "the image has no entrypoint and no command: say what to run after --");
  }
  // Before and after the command runs they would leave the sandbox behind. What comes before is passed on
  // as soon as it runs.
  BlockStopSignals();
  ASSIGN_OR_RETURN(backends::LauncherOptions launcher_options,
                   ToLauncherOptions(options.state, options.cache));
  backends::Launcher launcher(std::move(launcher_options));
  RemoveLeftovers(launcher);
  // What a killed run leaves ends soon, and goes with the next one.
  constexpr std::chrono::seconds kIdle{60};
  sandbox_options.idle_ttl = kIdle;
  ASSIGN_OR_RETURN(const std::unique_ptr<backends::Sandbox> sandbox,
                   launcher.Create(*choice.backend, sandbox_options), "run {}", options.image);
  absl::StatusOr<int> code = ExecInSandbox(*sandbox, std::move(request), exec);
  const absl::Status stopped = sandbox->Stop();
  RETURN_IF_ERROR(code.status());
  RETURN_IF_ERROR(stopped);
  return code;
}

}  // namespace lamina::cli
