// SPDX-License-Identifier: Apache-2.0
//
// `lamina commit` and `lamina fork`: what to do with what was written to a mount.
#include <unistd.h>

#include <chrono>
#include <memory>

#include "backends/group_freeze.h"
#include "backends/launcher.h"
#include "backends/mount_commit.h"
#include "fs/engine/client.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"

namespace lamina::cli {
namespace {

using nlohmann::json;
using std::chrono::steady_clock;

// "/srv/mnt", "./mnt" and "mnt", if that is a directory, are mount points; all else is an id.
bool IsPath(const std::string& source) {
  return source.find('/') != std::string::npos || ExistingDirectory(source).ok();
}

struct CommitFlags {
  std::string source;
  backends::WrittenCommitOptions commit;
  std::string name_space = "default";
  RegistryOptions registry;
  std::string state;
  bool json = false;
};

absl::StatusOr<fs::CommitResult> CommitSource(const CommitFlags& flags) {
  if (IsPath(flags.source)) {
    ASSIGN_OR_RETURN(const std::string target, ExistingDirectory(flags.source), "mount point");
    ASSIGN_OR_RETURN(std::string state, StateFor(flags.state, target));
    fs::Client client(std::move(state), ProgramPath());
    return backends::CommitMount(client, target, flags.commit);
  }
  const std::string state = flags.state.empty() ? fs::DefaultStateDirectory() : flags.state;
  fs::Client client(state, ProgramPath());
  const absl::StatusOr<std::string> rootfs = backends::RootfsOf(state, flags.source);
  if (rootfs.ok()) return backends::CommitMount(client, *rootfs, flags.commit);
  auto result = backends::CommitContainer(client, flags.name_space, flags.source, flags.commit);
  // Without a laminad it can only be a sandbox.
  return absl::IsUnavailable(result.status()) ? rootfs.status() : result;
}

absl::StatusOr<int> Commit(CommitFlags& flags) {
  backends::WrittenCommitOptions& commit = flags.commit;
  ASSIGN_OR_RETURN(commit.destination, AbsoluteReference(commit.destination));
  ASSIGN_OR_RETURN(commit.registry, ToSettings(flags.registry));
  if (::geteuid() != 0) {
    return absl::FailedPreconditionError("commit needs root: writable mounts are root's");
  }
  const auto start = steady_clock::now();
  ASSIGN_OR_RETURN(const fs::CommitResult result, CommitSource(flags), "commit {}", flags.source);
  const double seconds = std::chrono::duration<double>(steady_clock::now() - start).count();
  const double pause_ms = static_cast<double>(result.paused.count()) / 1000;
  if (flags.json) {
    json layers = json::array();
    for (const fs::WrittenLayer& layer : result.layers) {
      layers.push_back({{"digest", layer.blob.digest.ToString()},
                        {"bytes", layer.blob.size},
                        {"content_bytes", layer.blob.content_bytes},
                        {"files", layer.inodes}});
    }
    PrintJson({{"manifest_digest", result.manifest_digest.ToString()},
               {"layers", layers},
               {"layers_there", result.layers_there},
               {"layers_linked", result.layers_linked},
               {"layers_mounted", result.layers_mounted},
               {"layers_copied", result.layers_copied},
               {"copied_bytes", result.copied_bytes},
               {"pause_ms", pause_ms},
               {"seconds", seconds}});
    return kExitOk;
  }
  const fs::WrittenLayer& layer = result.layers.back();
  PrintText("{}\n", result.manifest_digest.ToString());
  PrintText("{} files, {} of content, {} stored, {:.1f} s; paused for {:.1f} ms\n", layer.inodes,
            HumanSize(layer.blob.content_bytes), HumanSize(layer.blob.size), seconds, pause_ms);
  PrintText("layers below: {} were there, {} linked, {} mounted, {} copied ({})\n",
            result.layers_there, result.layers_linked, result.layers_mounted, result.layers_copied,
            HumanSize(result.copied_bytes));
  return kExitOk;
}

struct ForkFlags {
  fs::ForkRequest request;
  std::string state;
  bool pause = true;
  bool json = false;
};

absl::StatusOr<int> Fork(ForkFlags& flags) {
  ASSIGN_OR_RETURN(flags.request.target, ExistingDirectory(flags.request.target), "mount point");
  ASSIGN_OR_RETURN(std::string state, StateFor(flags.state, flags.request.target));
  fs::Client client(std::move(state), ProgramPath());
  std::vector<backends::Cgroup> groups;
  if (flags.pause) {
    ASSIGN_OR_RETURN(groups, backends::GroupsOnMount(flags.request.target), "fork");
  }
  backends::GroupFreeze freeze(std::move(groups));
  RETURN_IF_ERROR(freeze.Begin(), "fork {}", flags.request.target);
  const absl::StatusOr<json> forks = client.Fork(flags.request);
  freeze.End();
  RETURN_IF_ERROR(forks.status());
  if (flags.json) {
    PrintJson(*forks);
  } else {
    for (const json& fork : *forks) PrintText("{}\n", fork.value("target", ""));
  }
  return kExitOk;
}

}  // namespace

void AddCommit(CLI::App& app, Action& run) {
  auto flags = std::make_shared<CommitFlags>();
  CLI::App* command = app.add_subcommand(
      "commit", "Make an image of a writable mount: what was written becomes one more layer");
  command
      ->add_option("source", flags->source,
                   "Mount point of a writable mount, the id of a sandbox, or of a container of "
                   "containerd whose snapshotter laminad is")
      ->required();
  command
      ->add_option("destination", flags->commit.destination,
                   "oci:DIR[:TAG] or docker://HOST/REPOSITORY[:TAG]; layers that it has already "
                   "are not sent again")
      ->required();
  command->add_option("--namespace", flags->name_space, "containerd's, of a container")
      ->capture_default_str();
  command->add_option("--message,-m", flags->commit.comment, "Comment for the image's history");
  command->add_option("--level", flags->commit.level, "zstd compression level")
      ->capture_default_str()
      ->check(CLI::Range(1, 19));
  command->add_flag("!--no-pause", flags->commit.pause,
                    "Let containers that run there go on; a file that changes while it is read is "
                    "an error");
  AddRegistryOptions(*command, flags->registry);
  AddStateOfMountOption(*command, flags->state);
  command->add_flag("--json", flags->json, "Print the result as JSON");
  command->callback([flags, &run] { run = [flags] { return Commit(*flags); }; });
}

void AddFork(CLI::App& app, Action& run) {
  auto flags = std::make_shared<ForkFlags>();
  CLI::App* command = app.add_subcommand(
      "fork", "Make writable mounts that start from what is in another one, and print where");
  command->add_option("mount", flags->request.target, "Mount point of a writable mount")
      ->required();
  command->add_option("count", flags->request.count, "How many")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  command->add_flag("!--no-pause", flags->pause,
                    "Let containers that run there go on, also if a file is half written then");
  AddStateOfMountOption(*command, flags->state);
  command->add_flag("--json", flags->json, "Print JSON");
  command->callback([flags, &run] { run = [flags] { return Fork(*flags); }; });
}

}  // namespace lamina::cli
