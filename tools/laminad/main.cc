// SPDX-License-Identifier: Apache-2.0
//
// The daemon of a node: a supervisor that holds descriptors, and a worker that it starts from the
// same program, with the same options and --worker.
#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "fs/control/control_server.h"
#include "fs/control/metrics.h"
#include "fs/engine/server.h"
#include "snapshotter/container_client.h"
#include "snapshotter/service.h"
#include "tools/laminad/config.h"
#include "tools/laminad/container_op.h"
#include "tools/laminad/logging.h"
#include "tools/laminad/sockets.h"
#include "tools/laminad/supervisor.h"

namespace lamina::daemon {
namespace {

constexpr const char* kCheckConfig = "--check-config";
constexpr const char* kRunningState = "--running-state";

struct Options {
  std::string config_path = kDefaultConfigPath;
  bool config_given = false;
  std::string state;  // instead of the configuration's
  // Check the configuration for a laminad that runs on this state directory.
  std::string running_state;
  bool worker = false;
  bool check_config = false;
};

absl::StatusOr<Config> ConfigFor(const Options& options) {
  absl::StatusOr<Config> config = ReadConfig(options.config_path);
  // Everything has a default, so there need not be a file where one is looked for unasked.
  if (absl::IsNotFound(config.status()) && !options.config_given) {
    config = ParseConfig("", options.config_path);
  }
  if (config.ok() && !options.state.empty()) config->state = options.state;
  return config;
}

struct Services {
  std::vector<std::unique_ptr<fs::GrpcServer>> api;
  std::vector<std::unique_ptr<fs::MetricsServer>> metrics;
  absl::Status no_snapshotter;                            // why there is none
  std::shared_ptr<snapshotter::Snapshotter> snapshotter;  // may be null
  std::unique_ptr<snapshotter::ContainerClient> containerd;
  std::vector<std::unique_ptr<fs::GrpcServer>> snapshots;
};

absl::StatusOr<registry::Settings> RegistrySettings(const Config& config) {
  registry::Settings settings{.plain_http = config.registry_plain_http,
                              .ca_file = config.registry_ca_file};
  ASSIGN_OR_RETURN(settings.credentials.files, registry::AuthFilesOfEnvironment());
  for (const std::string& text : config.registry_mirrors) {
    ASSIGN_OR_RETURN(registry::Mirror mirror, registry::Mirror::Parse(text));
    settings.mirrors.push_back(std::move(mirror));
  }
  return settings;
}

absl::Status StartSnapshotter(const Config& config, fs::Engine& engine,
                              std::vector<UniqueFd> sockets, Services& services) {
  ASSIGN_OR_RETURN(const registry::Settings registry, RegistrySettings(config));
  auto finder = snapshotter::LayerFinder::Create({.containerd = config.containerd_socket,
                                                  .registry = registry,
                                                  .registries = config.snapshotter_registries,
                                                  .referrers = config.snapshotter_referrers,
                                                  .prefetch = config.snapshotter_prefetch},
                                                 engine);
  ASSIGN_OR_RETURN(services.snapshotter,
                   snapshotter::Snapshotter::Open({.state = config.state,
                                                   .registry = registry,
                                                   .layer_images = config.snapshotter_layer_images,
                                                   .idle = config.snapshotter_idle},
                                                  engine, std::move(finder)));
  services.containerd = snapshotter::ContainerClient::Create(config.containerd_socket);
  for (UniqueFd& socket : sockets) {
    ASSIGN_OR_RETURN(auto server,
                     snapshotter::StartSnapshotService(services.snapshotter, std::move(socket)));
    services.snapshots.push_back(std::move(server));
  }
  return absl::OkStatus();
}

// Requests on the control socket that are not the engine's.
absl::StatusOr<nlohmann::json> Execute(Services& services, std::string_view op,
                                       const nlohmann::json& request) {
  if (op != "container") {
    return absl::InvalidArgumentError(fmt::format("unknown op '{}'", op));
  }
  if (services.snapshotter == nullptr) return services.no_snapshotter;
  return DescribeContainer(*services.snapshotter, *services.containerd, request);
}

absl::StatusOr<std::shared_ptr<Services>> StartServices(const Config& config,
                                                        fs::DescriptorHolder& holder,
                                                        fs::Engine& engine) {
  auto services = std::make_shared<Services>();
  for (UniqueFd& socket : holder.TakeAll(kApiName)) {
    ASSIGN_OR_RETURN(auto server, fs::StartControlServer(engine, std::move(socket)));
    services->api.push_back(std::move(server));
  }
  for (UniqueFd& socket : holder.TakeAll(kMetricsName)) {
    ASSIGN_OR_RETURN(auto server, fs::MetricsServer::Start(engine, std::move(socket)));
    services->metrics.push_back(std::move(server));
  }
  std::vector<UniqueFd> sockets = holder.TakeAll(kSnapshotterName);
  if (sockets.empty()) {
    services->no_snapshotter = absl::FailedPreconditionError(
        "this laminad is no snapshotter of containerd: [snapshotter] is not in its configuration");
    return services;
  }
  absl::Status status = StartSnapshotter(config, engine, std::move(sockets), *services);
  if (status.ok()) return services;
  // Containers that run need their mounts more than others need to be made.
  if (!engine.HasMounts() && !engine.HasDetachedMounts()) return status;
  spdlog::error("no snapshotter until the next start: {}", std::string(status.message()));
  services->snapshots.clear();
  services->snapshotter.reset();
  services->no_snapshotter = Annotate(std::move(status), "the snapshotter did not start");
  return services;
}

absl::Status RunWorker(const Config& config) {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&signals, signal);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  ASSIGN_OR_RETURN(auto descriptors, fs::InheritedDescriptors());
  ASSIGN_OR_RETURN(fs::NotifySocket notify, fs::NotifySocket::FromEnvironment());
  const auto holder =
      std::make_shared<fs::DescriptorHolder>(std::move(descriptors), std::move(notify));
  fs::ServerOptions options;
  options.engine.state = config.state;
  options.engine.cache = config.cache;
  options.engine.holder = holder;
  // The server owns them: they must end before the engine does.
  const auto running = std::make_shared<std::weak_ptr<Services>>();
  options.start_services = [&config, holder,
                            running](fs::Engine& engine) -> absl::StatusOr<std::shared_ptr<void>> {
    ASSIGN_OR_RETURN(std::shared_ptr<Services> services, StartServices(config, *holder, engine));
    *running = services;
    return std::shared_ptr<void>(std::move(services));
  };
  options.execute = [running](std::string_view op,
                              const nlohmann::json& request) -> absl::StatusOr<nlohmann::json> {
    const std::shared_ptr<Services> services = running->lock();
    if (services == nullptr) return absl::UnavailableError("laminad is ending");
    return Execute(*services, op, request);
  };
  options.ready = [holder] {
    if (absl::Status status = holder->Ready(); !status.ok()) {
      spdlog::error("{}", std::string(status.message()));
    }
  };
  return fs::RunServer(options);
}

// A worker on another state directory than the supervisor's would find none of the mounts whose
// descriptors it gets. The sockets stay those of the supervisor's start.
absl::Status CheckReload(const Config& config, const std::string& running_state) {
  std::error_code ignored;
  if (config.state == running_state ||
      std::filesystem::equivalent(config.state, running_state, ignored)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      fmt::format("state is {} now, and laminad runs on {}: only a restart changes it",
                  config.state, running_state));
}

absl::Status Check(const Config& config, const Options& options) {
  RETURN_IF_ERROR(SocketsOf(config).status());
  if (!options.running_state.empty()) return CheckReload(config, options.running_state);
  return CheckSockets(config);
}

absl::Status Supervise(const Config& config, const Options& options,
                       std::vector<std::string> arguments) {
  ASSIGN_OR_RETURN(std::vector<ListeningSocket> sockets, SocketsOf(config));
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return ErrnoStatus(error.value(), "find this program");
  arguments.insert(arguments.begin(), program.string());
  std::vector<std::string> check = arguments;
  check.emplace_back(kCheckConfig);
  check.push_back(fmt::format("{}={}", kRunningState, config.state));
  // The file may say otherwise by the time a worker reads it.
  if (options.state.empty()) arguments.push_back("--state=" + config.state);
  arguments.emplace_back("--worker");
  return RunSupervisor({.state = config.state,
                        .sockets = std::move(sockets),
                        .command = std::move(arguments),
                        .check = std::move(check),
                        .give_up_after = config.give_up_after,
                        .drain_for = config.drain_for});
}

absl::Status Run(const Options& options, std::vector<std::string> arguments) {
  ASSIGN_OR_RETURN(const Config config, ConfigFor(options));
  if (options.check_config) return Check(config, options);
  SetUpLogging(config);
  return options.worker ? RunWorker(config) : Supervise(config, options, std::move(arguments));
}

}  // namespace
}  // namespace lamina::daemon

int main(int argc, char** argv) {
  // Whoever starts this may ignore it, and then children could not be waited for.
  ::signal(SIGCHLD, SIG_DFL);
  lamina::daemon::Options options;
  CLI::App app("The daemon of a node: serves image mounts, and keeps them when it is restarted.",
               "laminad");
  app.set_version_flag("--version", LAMINA_VERSION);
  app.footer(
      "SIGHUP: a new worker is started from the program on the disk, and mounts stay. Nothing\n"
      "happens if its configuration is wrong.\n"
      "SIGTERM: everything is unmounted, but for mounts whose descriptors systemd keeps.");
  CLI::Option* config =
      app.add_option("--config", options.config_path, "Configuration")->capture_default_str();
  app.add_option("--state", options.state, "State directory [as the configuration says]");
  app.add_flag(lamina::daemon::kCheckConfig, options.check_config,
               "Only check the configuration: 0 if laminad would take it, 2 if not");
  app.add_option(lamina::daemon::kRunningState, options.running_state)->group("");
  app.add_flag("--worker", options.worker)->group("");  // for the supervisor
  CLI11_PARSE(app, argc, argv);
  options.config_given = config->count() > 0;

  lamina::daemon::SetUpLogging({});  // until the configuration is read
  const absl::Status status =
      lamina::daemon::Run(options, std::vector<std::string>(argv + 1, argv + argc));
  if (status.ok()) return 0;
  spdlog::error("{}", std::string(status.message()));
  return options.check_config ? lamina::daemon::kWrongConfiguration : 1;
}
