// SPDX-License-Identifier: Apache-2.0
//
// Options of sandboxes that commands share: `lamina sandbox create`, `lamina sandbox exec` and
// `lamina run --backend`.
#ifndef LAMINA_TOOLS_LAMINA_SANDBOX_OPTIONS_H_
#define LAMINA_TOOLS_LAMINA_SANDBOX_OPTIONS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "backends/backend.h"
#include "backends/launcher.h"
#include "backends/sandbox.h"
#include "tools/lamina/commands.h"

namespace lamina::cli {

struct SandboxFlags {
  std::string backend = "auto";
  std::vector<std::string> needs;
  std::string memory;
  double cpus = 0;
  uint64_t processes = 0;
  std::string disk;
  std::vector<std::string> environment;
  std::string user;
  std::string working_directory;
  std::string network = "none";
  std::string ttl;
  std::string idle_ttl;
  uint32_t warm = 2;
  std::string runtime;
  bool keep_memory = false;
};
void AddSandboxFlags(CLI::App& command, SandboxFlags& flags);
// All but image and snapshot.
absl::StatusOr<backends::SandboxOptions> ToSandboxOptions(const SandboxFlags& flags);
// The backend that was named, or for "auto" the one that is chosen, with the reason.
absl::StatusOr<backends::Choice> ToBackend(const SandboxFlags& flags, bool stateless);

struct ExecFlags {
  std::string timeout;
  std::string cpu_time;
  std::string output_limit;
  std::string file_limit;
  std::vector<std::string> files_in;
  std::vector<std::string> files_out;
  bool interactive = false;
  bool json = false;
};
void AddExecFlags(CLI::App& command, ExecFlags& flags);

// Runs a program in a sandbox with this process' standard streams, passing on SIGTERM, SIGINT, SIGHUP
// and SIGQUIT, and writes the files that come back. With flags.json the result is printed, output
// included, and nothing is streamed. Returns the exit code of the command: the program's, 128 + n if
// it was ended by signal n, 1 if its sandbox ended.
absl::StatusOr<int> ExecInSandbox(backends::Sandbox& sandbox, backends::ExecRequest request,
                                  const ExecFlags& flags);

// "500ms", "30s", "10m", "2h", "1d".
absl::StatusOr<std::chrono::milliseconds> ParseDuration(std::string_view text);

// For commands with a state directory: where the helpers of this program are.
absl::StatusOr<backends::LauncherOptions> ToLauncherOptions(const std::string& state,
                                                            const CacheFlags& cache);

// What of other sandboxes is to be removed. If some cannot be, that is said on standard error: it is no
// reason to fail at something else.
void RemoveLeftovers(backends::Launcher& launcher);

}  // namespace lamina::cli

#endif  // LAMINA_TOOLS_LAMINA_SANDBOX_OPTIONS_H_
