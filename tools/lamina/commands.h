// SPDX-License-Identifier: Apache-2.0
//
// The commands of `lamina`. Each Add* function declares one command with its options to the parser
// and sets `run` if the user chose it; main() then calls it.
#ifndef LAMINA_TOOLS_LAMINA_COMMANDS_H_
#define LAMINA_TOOLS_LAMINA_COMMANDS_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "chunkstore/base/status.h"
#include "chunkstore/registry/settings.h"
#include "fs/engine/cache_options.h"
#include "fs/engine/engine.h"

namespace lamina::cli {

// Exit codes, also in --help: 0 done, 1 failed, 2 wrong usage, 128 + n ended by signal n. `run`
// returns the container's own, 127 if its program is not there and 126 if it cannot be executed.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

// Of an argument that names a converted image.
inline constexpr const char* kImageHelp =
    "oci:DIR[:TAG] or docker://HOST/REPOSITORY[:TAG][@DIGEST]";

// What the chosen command does; gives the exit code.
using Action = std::function<absl::StatusOr<int>()>;

void AddConvert(CLI::App& app, Action& run);
void AddMount(CLI::App& app, Action& run);
void AddUmount(CLI::App& app, Action& run);
void AddCommit(CLI::App& app, Action& run);
void AddFork(CLI::App& app, Action& run);
void AddStats(CLI::App& app, Action& run);
// `command` is the container's, cut out of the arguments by CutRunCommand.
void AddRun(CLI::App& app, std::vector<std::string> command, Action& run);
void AddInspect(CLI::App& app, Action& run);
void AddVerify(CLI::App& app, Action& run);
void AddServe(CLI::App& app, Action& run);
void AddCache(CLI::App& app, Action& run);
void AddPrefetch(CLI::App& app, Action& run);
// `command` is the container's, as in AddRun.
void AddProfile(CLI::App& app, std::vector<std::string> command, Action& run);

// `command` is the program of `sandbox exec`, as in AddRun.
void AddSandbox(CLI::App& app, std::vector<std::string> command, Action& run);

// Cuts the container's command and arguments out of those of `lamina run` and returns them: what
// follows the image, without a "--" before it. For `lamina profile record` and `lamina sandbox exec`,
// what follows the "--". CLI11 must not see them: it would take their options for ours, and splits an
// argument such as "[a,b]" in two.
std::vector<std::string> CutRunCommand(std::vector<std::string>& arguments);

// Marks an error as one of usage, for kExitUsage. Context must be added before.
absl::Status UsageError(absl::Status status);
bool IsUsageError(const absl::Status& status);

// An image reference with the path in it, if there is one, made absolute, for the engine, which has
// another working directory. What is no reference is an error of usage.
absl::StatusOr<std::string> AbsoluteReference(const std::string& reference);
// The path of an existing directory, absolute and without symbolic links.
absl::StatusOr<std::string> ExistingDirectory(const std::string& path);
// A path from the command line, made absolute: the engine has another working directory.
std::string AbsolutePath(const std::string& path);
// Adds --state, made absolute; the default is DefaultStateDirectory().
void AddStateOption(CLI::App& command, std::string& state);
// The same without a default: `state` stays empty.
void AddStateOfMountOption(CLI::App& command, std::string& state);
// What the user said, or what the mount at `target` itself says; the default if there is none.
absl::StatusOr<std::string> StateFor(const std::string& given, const std::string& target);
// --cache, --cache-size and --cache-free: for an engine, or one that the command may have to start.
struct CacheFlags {
  std::string mode = "disk";
  std::string size = "50%";
  std::string free = "5%";
};
void AddCacheOptions(CLI::App& command, CacheFlags& flags);
absl::StatusOr<fs::CacheOptions> ParseCacheFlags(const CacheFlags& flags);
// The same as arguments of `lamina serve`.
absl::StatusOr<std::vector<std::string>> EngineArguments(const CacheFlags& flags);

// Adds --layer: more images, put on top of the one that is mounted, lowest first.
void AddLayerOption(CLI::App& command, std::vector<std::string>& layers);
absl::Status MakeAbsolute(std::vector<std::string>& references);

// How registries are reached: options that all commands with images share.
struct RegistryOptions {
  std::vector<std::string> credentials;
  std::vector<std::string> mirrors;
  std::string ca_file;
  bool plain_http = false;
};
void AddRegistryOptions(CLI::App& command, RegistryOptions& options);
// With what the environment adds: where credentials are kept.
absl::StatusOr<registry::Settings> ToSettings(const RegistryOptions& options);

// Adds --no-prefetch, --prefetch-rate and --fill.
void AddPrefetchOptions(CLI::App& command, fs::PrefetchOptions& options);
// The path of this program, to start engines with.
std::string ProgramPath();
// Where the programs are that it starts: lamina-agent, lamina-fncall, lamina-vm.
std::string HelperDirectory();

}  // namespace lamina::cli

#endif  // LAMINA_TOOLS_LAMINA_COMMANDS_H_
