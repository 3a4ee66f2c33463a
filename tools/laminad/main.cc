// SPDX-License-Identifier: Apache-2.0
//
// The daemon of a node: a supervisor that holds descriptors, and a worker that it starts from the
// same program, with the same options and --worker.
#include <fmt/format.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <system_error>

#include "fs/engine/client.h"
#include "fs/engine/server.h"
#include "tools/laminad/supervisor.h"

namespace lamina::daemon {
namespace {

absl::Status RunWorker(const std::string& state) {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&signals, signal);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  fs::ServerOptions options;
  options.engine.state = state;
  ASSIGN_OR_RETURN(auto descriptors, fs::InheritedDescriptors());
  ASSIGN_OR_RETURN(fs::NotifySocket notify, fs::NotifySocket::FromEnvironment());
  options.engine.holder =
      std::make_shared<fs::DescriptorHolder>(std::move(descriptors), std::move(notify));
  options.ready = [holder = options.engine.holder] {
    if (absl::Status status = holder->Ready(); !status.ok()) {
      spdlog::error("{}", std::string(status.message()));
    }
  };
  return fs::RunServer(options);
}

}  // namespace
}  // namespace lamina::daemon

int main(int argc, char** argv) {
  spdlog::set_default_logger(spdlog::stderr_logger_mt("laminad"));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");

  CLI::App app("Keeps a node's image mounts alive.", "laminad");
  app.set_version_flag("--version", LAMINA_VERSION);
  std::string state = lamina::fs::DefaultStateDirectory();
  bool worker = false;
  app.add_option("--state", state, "Directory of cached blobs, index and mounts");
  app.add_flag("--worker", worker)->group("");  // for the supervisor
  CLI11_PARSE(app, argc, argv);

  absl::Status status;
  if (worker) {
    status = lamina::daemon::RunWorker(state);
  } else {
    std::error_code error;
    lamina::daemon::SupervisorOptions options{.state = state};
    options.command = {std::filesystem::read_symlink("/proc/self/exe", error).string()};
    options.command.insert(options.command.end(), argv + 1, argv + argc);
    options.command.emplace_back("--worker");
    status = lamina::daemon::RunSupervisor(options);
  }
  if (status.ok()) return 0;
  spdlog::error("{}", std::string(status.message()));
  return 1;
}
