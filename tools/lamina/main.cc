// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <limits.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "fs/engine/client.h"
#include "fs/image/reference.h"
#include "tools/lamina/commands.h"

namespace lamina::cli {

absl::StatusOr<std::string> AbsoluteReference(const std::string& reference) {
  constexpr std::string_view kPrefix = "oci:";
  RETURN_IF_ERROR(fs::ImageReference::ParseConverted(reference).status());
  if (!reference.starts_with(kPrefix)) return reference;
  const std::string rest = reference.substr(kPrefix.size());
  if (rest.starts_with('/')) return reference;
  std::error_code error;
  const std::filesystem::path here = std::filesystem::current_path(error);
  if (error) return ErrnoStatus(error.value(), "find the current directory");
  return fmt::format("{}{}/{}", kPrefix, here.string(), rest);
}

absl::StatusOr<std::string> ExistingDirectory(const std::string& path) {
  std::error_code error;
  const std::filesystem::path resolved = std::filesystem::canonical(path, error);
  if (error) return ErrnoStatus(error.value(), path);
  if (!std::filesystem::is_directory(resolved, error)) {
    return absl::InvalidArgumentError(path + ": not a directory");
  }
  return resolved.string();
}

void AddStateOption(CLI::App& command, std::string& state) {
  state = fs::DefaultStateDirectory();
  command.add_option("--state", state, "Directory of cached blobs, index and mounts")
      ->capture_default_str();
}

std::string ProgramPath() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "lamina" : path.string();
}

}  // namespace lamina::cli

int main(int argc, char** argv) {
  // Standard output is for results: what the libraries log goes to standard error.
  spdlog::set_default_logger(spdlog::stderr_logger_mt("lamina"));
  spdlog::set_pattern("lamina: %v");
  spdlog::set_level(spdlog::level::warn);

  std::vector<std::string> arguments(argv + 1, argv + argc);
  std::vector<std::string> container_command = lamina::cli::CutRunCommand(arguments);
  CLI::App app("Starts OCI images at once by reading only what is used.", "lamina");
  app.require_subcommand(1);
  app.set_version_flag("--version", LAMINA_VERSION);
  app.footer(
      "An <image> is oci:DIR[:TAG], a converted image in an OCI layout directory, or\n"
      "docker://HOST[:PORT]/REPOSITORY[:TAG][@DIGEST], one in a registry.\n"
      "Exit codes: 0 done, 1 failed, 2 wrong usage; 'run' gives the container's own.");
  lamina::cli::Action run;
  lamina::cli::AddConvert(app, run);
  lamina::cli::AddMount(app, run);
  lamina::cli::AddUmount(app, run);
  lamina::cli::AddRun(app, std::move(container_command), run);
  lamina::cli::AddInspect(app, run);
  lamina::cli::AddVerify(app, run);
  lamina::cli::AddStats(app, run);
  lamina::cli::AddServe(app, run);
  lamina::cli::AddCache(app, run);

  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    const bool asked_for_text = error.get_exit_code() == 0;  // --help, --version
    app.exit(error);
    return asked_for_text ? lamina::cli::kExitOk : lamina::cli::kExitUsage;
  }
  const absl::StatusOr<int> result = run();
  if (result.ok()) return *result;
  fmt::print(stderr, "lamina: {}\n", std::string(result.status().message()));
  return lamina::cli::kExitFailure;
}
