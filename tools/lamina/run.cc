// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "backends/crun.h"
#include "backends/oci_bundle.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/signals.h"
#include "fs/engine/client.h"
#include "fs/engine/messages.h"
#include "tools/lamina/bundle.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"
#include "tools/lamina/run.h"
#include "tools/lamina/run_in_sandbox.h"

namespace lamina::cli {
namespace {

using nlohmann::json;
using std::chrono::steady_clock;

struct Options {
  ContainerOptions container;
  SandboxFlags sandbox{.backend = "container"};
  ExecFlags exec{.interactive = true};
  bool json = false;
};

// Unmounts when it goes, whatever happened in between.
class MountedRootfs {
 public:
  static absl::StatusOr<MountedRootfs> Mount(fs::Client& client, fs::MountRequest request) {
    ASSIGN_OR_RETURN(const json reply, client.Mount(request));
    MountedRootfs mounted(client, request.target);
    ASSIGN_OR_RETURN(const fs::MountDescription mount, fs::ParseMountDescription(reply));
    ASSIGN_OR_RETURN(mounted.config_, fs::ConfigOf(mount));
    return mounted;
  }
  MountedRootfs(MountedRootfs&& other) noexcept
      : client_(other.client_),
        target_(std::exchange(other.target_, std::string())),
        config_(std::move(other.config_)) {}
  ~MountedRootfs() {
    if (absl::Status status = Unmount(); !status.ok()) {
      PrintError(std::string(status.message()));
    }
  }

  const oci::ImageConfig& config() const { return config_; }

  absl::Status Unmount() {
    const std::string target = std::exchange(target_, std::string());
    return target.empty() ? absl::OkStatus() : client_.Unmount(target);
  }

 private:
  MountedRootfs(fs::Client& client, std::string target)
      : client_(client), target_(std::move(target)) {}

  fs::Client& client_;
  std::string target_;
  oci::ImageConfig config_;
};

double MillisecondsSince(steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - start).count();
}

}  // namespace

absl::StatusOr<int> RunContainer(ContainerOptions options) {
  ASSIGN_OR_RETURN(const std::string reference, AbsoluteReference(options.image));
  RETURN_IF_ERROR(MakeAbsolute(options.layers));
  if (::geteuid() != 0) {
    return absl::FailedPreconditionError("run needs root: it mounts, and starts a container");
  }
  ASSIGN_OR_RETURN(const registry::Settings registry, ToSettings(options.registry));
  if (!options.writable_dir.empty()) {
    ASSIGN_OR_RETURN(options.writable_dir, ExistingDirectory(options.writable_dir),
                     "--writable-dir");
  }
  // Before and after the container runs they would leave its mount behind.
  BlockStopSignals();
  RemoveStaleBundles();
  ASSIGN_OR_RETURN(const Bundle bundle, Bundle::Create());
  const std::string rootfs = bundle.rootfs();

  const steady_clock::time_point start = steady_clock::now();
  ASSIGN_OR_RETURN(std::vector<std::string> engine, EngineArguments(options.cache));
  fs::Client client(options.state, ProgramPath(), std::move(engine));
  ASSIGN_OR_RETURN(MountedRootfs mounted,
                   MountedRootfs::Mount(client, {.image = reference,
                                                 .layer_images = options.layers,
                                                 .target = rootfs,
                                                 .writable = true,
                                                 .writable_dir = options.writable_dir,
                                                 .registry = registry,
                                                 .prefetch = options.prefetch,
                                                 .record = options.record}));
  const double mount_milliseconds = MillisecondsSince(start);
  if (options.started) options.started(client, rootfs);

  const bool terminal = ::isatty(STDIN_FILENO) != 0 && ::isatty(STDOUT_FILENO) != 0;
  ASSIGN_OR_RETURN(const std::string config,
                   backends::BundleConfig({.rootfs = rootfs,
                                           .config = mounted.config(),
                                           .command = options.command,
                                           .agent = HelperDirectory() + "/lamina-agent",
                                           .terminal = terminal}),
                   "run {}", options.image);
  RETURN_IF_ERROR(WriteFileAtomically(bundle.path() + "/config.json", config));
  const steady_clock::time_point run_start = steady_clock::now();
  ASSIGN_OR_RETURN(const int exit_code,
                   backends::RunWithCrun(bundle.path(), bundle.id(), bundle.lock()), "run {}",
                   options.image);
  const double run_milliseconds = MillisecondsSince(run_start);

  if (options.ended) {
    RETURN_IF_ERROR(options.ended(client, rootfs,
                                  {.exit_code = exit_code,
                                   .mount_milliseconds = mount_milliseconds,
                                   .run_milliseconds = run_milliseconds}));
  }
  RETURN_IF_ERROR(mounted.Unmount());
  return exit_code;
}

namespace {

absl::StatusOr<int> Run(Options& options) {
  ASSIGN_OR_RETURN(const backends::Choice choice, ToBackend(options.sandbox, /*stateless=*/false));
  if (!choice.reason.empty()) PrintError(choice.reason);
  if (choice.backend->name() != "container") {
    options.exec.json = options.json;
    return RunInSandbox(options.container, choice, options.sandbox, options.exec);
  }
  if (!options.exec.timeout.empty()) {
    return UsageError(absl::InvalidArgumentError("--timeout is for --backend=fncall"));
  }
  if (options.json) {
    options.container.ended = [](fs::Client& client, const std::string& rootfs,
                                 const ContainerSummary& run) -> absl::Status {
      ASSIGN_OR_RETURN(const json reports, client.Report(rootfs));
      const json summary = {{"exit_code", run.exit_code},
                            {"mount_ms", run.mount_milliseconds},
                            {"run_ms", run.run_milliseconds},
                            {"mount", reports.at(0)}};
      WriteText(stderr, summary.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
      return absl::OkStatus();
    };
  }
  return RunContainer(options.container);
}

bool TakesValue(std::string_view option) {
  return option == "--state" || option == "--writable-dir" || option == "--cache" ||
         option == "--cache-size" || option == "--cache-free" || option == "--creds" ||
         option == "--mirror" || option == "--prefetch-rate" || option == "--ca-file" ||
         option == "--backend" || option == "--needs" || option == "--timeout" ||
         option == "--layer";
}

}  // namespace

void AddRun(CLI::App& app, std::vector<std::string> command_line, Action& run) {
  auto options = std::make_shared<Options>();
  options->container.command = std::move(command_line);
  CLI::App* command = app.add_subcommand(
      "run", "Run a command of an image in a container (crun), on a writable overlay");
  command->add_option("image", options->container.image, kImageHelp)->required();
  AddLayerOption(*command, options->container.layers);
  command->add_option("--writable-dir", options->container.writable_dir,
                      "Keep what the container writes in this directory (in upper/)");
  command
      ->add_option("--backend", options->sandbox.backend,
                   "container; fncall: a stateless call in a jail; auto: the lightest that is "
                   "enough for --needs")
      ->capture_default_str();
  command
      ->add_option("--needs", options->sandbox.needs,
                   "For auto: stateless, state, root, own-kernel")
      ->allow_extra_args(false)  // else it takes the image for one as well
      ->delimiter(',')
      ->check(CLI::IsMember({"stateless", "state", "root", "own-kernel"}));
  command->add_option("--timeout", options->exec.timeout, "fncall: kill it after that time");
  AddRegistryOptions(*command, options->container.registry);
  AddStateOption(*command, options->container.state);
  AddCacheOptions(*command, options->container.cache);
  AddPrefetchOptions(*command, options->container.prefetch);
  command->add_flag("--json", options->json, "Print a summary on standard error at the end");
  // Only for the help: CutRunCommand has taken it out.
  command->add_option(
      "command",
      "Command and arguments, in place of the image's; its entrypoint, environment, "
      "user and working directory are kept");
  command->callback([options, &run] { run = [options] { return Run(*options); }; });
}

std::vector<std::string> CutRunCommand(std::vector<std::string>& arguments) {
  const bool after_dashes =
      arguments.size() > 1 && ((arguments[0] == "profile" && arguments[1] == "record") ||
                               (arguments[0] == "sandbox" && arguments[1] == "exec"));
  if (after_dashes) {
    const auto dashes = std::ranges::find(arguments, "--");
    if (dashes == arguments.end()) return {};
    std::vector<std::string> command(dashes + 1, arguments.end());
    arguments.erase(dashes, arguments.end());
    return command;
  }
  if (arguments.empty() || arguments[0] != "run") return {};
  bool image_seen = false;
  bool options_over = false;
  auto it = arguments.begin() + 1;
  for (; it != arguments.end(); ++it) {
    if (!options_over && *it == "--") {
      if (image_seen) break;
      options_over = true;
    } else if (!options_over && TakesValue(*it)) {
      if (++it == arguments.end()) return {};
    } else if (options_over || !it->starts_with('-')) {
      if (image_seen) break;
      image_seen = true;
    }
  }
  std::vector<std::string> command(it, arguments.end());
  arguments.erase(it, arguments.end());
  if (!options_over && !command.empty() && command[0] == "--") command.erase(command.begin());
  return command;
}

}  // namespace lamina::cli
