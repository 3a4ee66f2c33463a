// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <string_view>
#include <system_error>
#include <utility>

#include "fs/engine/client.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"

namespace lamina::cli {

namespace {

constexpr const char* kUsagePayload = "lamina.usage";

// A program may be started without standard streams. What it opens next would become one of them.
void OpenStandardStreams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    ::open("/dev/null", O_RDWR);  // gets the lowest number that is free
  }
}

// What libraries throw becomes an error like any other; nothing is left half done by then.
absl::StatusOr<int> Call(const Action& action) {
  try {
    return action();
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

// "--state=$UNSET" is an option without a value, for which CLI11 takes the argument that comes next.
absl::Status CheckForEmptyValues(const std::vector<std::string>& arguments) {
  for (const std::string& argument : arguments) {
    if (argument == "--") break;
    if (argument.starts_with("--") && argument.find('=') == argument.size() - 1) {
      return UsageError(
          absl::InvalidArgumentError(fmt::format("{}: nothing after the equals sign", argument)));
    }
  }
  return absl::OkStatus();
}

int Finish(const absl::StatusOr<int>& result) {
  if (!result.ok()) {
    PrintError(std::string(result.status().message()));
    return IsUsageError(result.status()) ? kExitUsage : kExitFailure;
  }
  if (const absl::Status written = FinishOutput(); !written.ok()) {
    PrintError(std::string(written.message()));
    return *result == kExitOk ? kExitFailure : *result;
  }
  return *result;
}

}  // namespace

absl::Status UsageError(absl::Status status) {
  if (!status.ok()) status.SetPayload(kUsagePayload, absl::Cord());
  return status;
}

bool IsUsageError(const absl::Status& status) {
  return status.GetPayload(kUsagePayload).has_value();
}

void AddStateOption(CLI::App& command, std::string& state) {
  state = fs::DefaultStateDirectory();
  command.add_option("--state", state, "Directory of cached blobs, index and mounts")
      ->capture_default_str()
      ->transform(AbsolutePath);
}

void AddStateOfMountOption(CLI::App& command, std::string& state) {
  command.add_option("--state", state, "State directory [as the mount says]")
      ->transform(AbsolutePath);
}

void AddLayerOption(CLI::App& command, std::vector<std::string>& layers) {
  command
      .add_option("--layer", layers,
                  "A converted image to put on top, as <image>; may be given more than once, the "
                  "lowest first. The first image's configuration stays")
      ->allow_extra_args(false);
}

void AddPrefetchOptions(CLI::App& command, fs::PrefetchOptions& options) {
  command.add_flag("!--no-prefetch", options.enabled, "Fetch nothing that is not read");
  command.add_flag("--fill", options.fill,
                   "Fetch all of the image in the background, while no reader waits");
  command
      .add_option_function<std::string>(
          "--prefetch-rate",
          [&options](const std::string& text) {
            const absl::StatusOr<uint64_t> rate = ParseSize(text);
            if (!rate.ok()) {
              throw CLI::ValidationError("--prefetch-rate", std::string(rate.status().message()));
            }
            options.bytes_per_second = *rate;
          },
          "Bytes a second to prefetch, as in 20M [no limit]")
      ->type_name("SIZE");
}

std::string ProgramPath() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "lamina" : path.string();
}

std::string HelperDirectory() {
  return std::filesystem::path(ProgramPath()).parent_path().string();
}

}  // namespace lamina::cli

int main(int argc, char** argv) {
  lamina::cli::OpenStandardStreams();
  // Whoever starts this may ignore it, and then children could not be waited for.
  ::signal(SIGCHLD, SIG_DFL);
  // Standard output is for results: what the libraries log goes to standard error.
  spdlog::set_default_logger(spdlog::stderr_logger_mt("lamina"));
  spdlog::set_pattern("lamina: %v");
  spdlog::set_level(spdlog::level::warn);

  std::vector<std::string> arguments(argv + 1, argv + argc);
  std::vector<std::string> container_command = lamina::cli::CutRunCommand(arguments);
  if (absl::Status status = lamina::cli::CheckForEmptyValues(arguments); !status.ok()) {
    return lamina::cli::Finish(status);
  }
  CLI::App app("Starts OCI images at once by reading only what is used.", "lamina");
  app.require_subcommand(1);
  app.set_version_flag("--version", LAMINA_VERSION);
  app.footer(
      "An <image> is oci:DIR[:TAG], a converted image in an OCI layout directory, or\n"
      "docker://HOST[:PORT]/REPOSITORY[:TAG][@DIGEST], one in a registry.\n"
      "Exit codes: 0 done, 1 failed, 2 wrong usage; 'run' and 'sandbox exec' give the program's,\n"
      "128 + n if it was ended by signal n (9 at a limit, which is said), 127 if it is not there,\n"
      "126 if it cannot be executed; a 'convert' that signal n stops gives 128 + n.");
  lamina::cli::Action run;
  // Every option of every command takes memory and time at each start.
  const std::pair<std::string_view, std::function<void()>> commands[] = {
      {"convert", [&] { lamina::cli::AddConvert(app, run); }},
      {"mount", [&] { lamina::cli::AddMount(app, run); }},
      {"umount", [&] { lamina::cli::AddUmount(app, run); }},
      {"commit", [&] { lamina::cli::AddCommit(app, run); }},
      {"fork", [&] { lamina::cli::AddFork(app, run); }},
      {"run", [&] { lamina::cli::AddRun(app, container_command, run); }},
      {"inspect", [&] { lamina::cli::AddInspect(app, run); }},
      {"verify", [&] { lamina::cli::AddVerify(app, run); }},
      {"stats", [&] { lamina::cli::AddStats(app, run); }},
      {"serve", [&] { lamina::cli::AddServe(app, run); }},
      {"cache", [&] { lamina::cli::AddCache(app, run); }},
      {"prefetch", [&] { lamina::cli::AddPrefetch(app, run); }},
      {"sandbox", [&] { lamina::cli::AddSandbox(app, container_command, run); }},
      {"profile", [&] { lamina::cli::AddProfile(app, container_command, run); }},
  };
  const std::string_view asked = arguments.empty() ? "" : std::string_view(arguments[0]);
  const bool is_known =
      std::ranges::any_of(commands, [&](const auto& command) { return command.first == asked; });
  for (const auto& [name, add] : commands) {
    if (!is_known || name == asked) add();
  }
  if (!is_known && !asked.empty() && !asked.starts_with('-')) {
    return lamina::cli::Finish(lamina::cli::UsageError(absl::InvalidArgumentError(
        fmt::format("there is no command '{}'; see lamina --help", asked))));
  }

  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    const bool asked_for_text = error.get_exit_code() == 0;  // --help, --version
    app.exit(error);
    return lamina::cli::Finish(asked_for_text ? lamina::cli::kExitOk : lamina::cli::kExitUsage);
  }
  return lamina::cli::Finish(lamina::cli::Call(run));
}
