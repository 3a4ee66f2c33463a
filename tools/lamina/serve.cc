// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <signal.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "chunkstore/base/file.h"
#include "fs/engine/engine.h"
#include "fs/engine/messages.h"
#include "fs/engine/server.h"
#include "tools/lamina/commands.h"

namespace lamina::cli {
namespace {

struct Options {
  fs::ServerOptions server;
  CacheFlags cache;
  int ready_fd = -1;
};

void Tell(UniqueFd& ready, const std::string& text) {
  if (!ready.valid()) return;
  [[maybe_unused]] const ssize_t written = ::write(ready.get(), text.data(), text.size());
  ready.Reset();
}

// Leaves the caller's session, terminal and descriptors but `ready`; the log goes to a file.
absl::Status Detach(const std::string& state, int ready) {
  if (const pid_t child = ::fork(); child != 0) {
    if (child < 0) return ErrnoStatus(errno, "fork");
    ::_exit(0);
  }
  ::setsid();
  // A pipe of the caller's would not end for its reader as long as the engine lives.
  const auto after_ready = static_cast<unsigned>(ready) + 1;
  if (ready > STDERR_FILENO + 1) ::close_range(STDERR_FILENO + 1, after_ready - 2, 0);
  ::close_range(after_ready, ~0U, 0);
  if (::chdir("/") != 0) return ErrnoStatus(errno, "chdir /");
  RETURN_IF_ERROR(fs::PrepareStateDirectory(state));
  ASSIGN_OR_RETURN(const UniqueFd null, OpenFile("/dev/null", O_RDWR));
  ASSIGN_OR_RETURN(const UniqueFd log, OpenFile(fmt::format("{}/{}", state, fs::kEngineLog),
                                                O_WRONLY | O_CREAT | O_APPEND, 0600));
  ::dup2(null.get(), STDIN_FILENO);
  ::dup2(log.get(), STDOUT_FILENO);
  ::dup2(log.get(), STDERR_FILENO);
  return absl::OkStatus();
}

absl::StatusOr<int> Run(Options& options) {
  ASSIGN_OR_RETURN(options.server.engine.cache, ParseCacheFlags(options.cache));
  options.server.engine.cache.once_used = options.server.end_when_idle;
  UniqueFd ready(options.ready_fd);
  if (ready.valid()) {
    ::fcntl(ready.get(), F_SETFD, FD_CLOEXEC);
    if (absl::Status status = Detach(options.server.engine.state, options.ready_fd); !status.ok()) {
      Tell(ready, fs::ErrorToJson(status).dump());
      return kExitFailure;  // the caller prints what it was told
    }
  }
  RaiseDescriptorLimit();  // each blob of each mount takes a few
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
  spdlog::set_level(spdlog::level::info);

  options.server.ready = [&ready] { Tell(ready, "ok"); };
  const absl::Status status = fs::RunServer(options.server);
  if (!status.ok()) {
    Tell(ready, fs::ErrorToJson(status).dump());
    spdlog::error("{}", std::string(status.message()));
    return kExitFailure;
  }
  return kExitOk;
}

}  // namespace

void AddServe(CLI::App& app, Action& run) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "serve", "Serve the mounts of a state directory; other commands start this when needed");
  AddStateOption(*command, options->server.engine.state);
  AddCacheOptions(*command, options->cache);
  command->add_flag("--end-when-idle", options->server.end_when_idle,
                    "End when the last mount goes");
  command->add_option("--ready-fd", options->ready_fd,
                      "Go to the background, and say on this descriptor when it is ready");
  command->callback([options, &run] { run = [options] { return Run(*options); }; });
}

}  // namespace lamina::cli
