// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "fs/engine/client.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"

namespace lamina::cli {
namespace {

using nlohmann::json;

struct MountOptions {
  fs::MountRequest request;
  RegistryOptions registry;
  std::string transport = "auto";
  std::string state;
  CacheFlags cache;
  bool json = false;
};

absl::StatusOr<int> Mount(MountOptions& options) {
  fs::MountRequest& request = options.request;
  ASSIGN_OR_RETURN(request.transport, fs::ParseTransport(options.transport));
  ASSIGN_OR_RETURN(request.image, AbsoluteReference(request.image));
  RETURN_IF_ERROR(MakeAbsolute(request.layer_images));
  ASSIGN_OR_RETURN(request.registry, ToSettings(options.registry));
  ASSIGN_OR_RETURN(request.target, ExistingDirectory(request.target), "mount point");
  if (!request.writable_dir.empty()) {
    ASSIGN_OR_RETURN(request.writable_dir, ExistingDirectory(request.writable_dir),
                     "--writable-dir");
  }
  ASSIGN_OR_RETURN(std::vector<std::string> engine, EngineArguments(options.cache));
  fs::Client client(options.state, ProgramPath(), std::move(engine));
  ASSIGN_OR_RETURN(json mount, client.Mount(request));
  mount.erase("config");
  if (options.json) {
    PrintJson(mount);
  } else {
    PrintText("{} at {} by {} ({})\n", mount.value("image", ""), mount.value("target", ""),
              mount.value("transport", ""), mount.value("reason", ""));
  }
  return kExitOk;
}

struct UmountOptions {
  std::string target;
  std::string state;
};

// The directory may be unreachable (its engine was killed), so only the part above it is resolved.
absl::StatusOr<std::string> MountPoint(const std::string& path) {
  const absl::StatusOr<std::string> resolved = ExistingDirectory(path);
  if (resolved.ok()) return resolved;
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error).lexically_normal();
  const std::filesystem::path parent = std::filesystem::canonical(absolute.parent_path(), error);
  if (error) return resolved.status();
  return (parent / absolute.filename()).string();
}

absl::StatusOr<int> Umount(const UmountOptions& options) {
  ASSIGN_OR_RETURN(const std::string target, MountPoint(options.target));
  ASSIGN_OR_RETURN(std::string state, StateFor(options.state, target));
  fs::Client client(std::move(state), ProgramPath());
  RETURN_IF_ERROR(client.Unmount(target));
  return kExitOk;
}

struct StatsOptions {
  std::string target;
  bool all = false;
  std::string state;
  bool json = false;
};

std::string Latency(const json& mount, const char* name) {
  const json& latency = mount.at(name);
  if (latency.at("count") == 0) return "none yet";
  return fmt::format("{:.0f} / {:.0f} / {:.0f} us", latency.at("p50_us").get<double>(),
                     latency.at("p95_us").get<double>(), latency.at("p99_us").get<double>());
}

void PrintStats(const json& mount) {
  const auto number = [&mount](const char* name) { return mount.at(name).get<uint64_t>(); };
  PrintText("{}\n", mount.at("target").get<std::string>());
  PrintText("  image        {} ({} layers)\n", mount.at("image").get<std::string>(),
            number("layers"));
  PrintText("  transport    {} ({})\n", mount.at("transport").get<std::string>(),
            mount.at("reason").get<std::string>());
  if (const uint64_t sharing = number("sharing"); sharing > 1) {
    PrintText("  counted for  {} mounts, which share what is read\n", sharing);
  }
  PrintText("  read         {} in {} requests, {} had to wait, {} failed\n",
            HumanSize(number("read_bytes")), number("read_requests"), number("missed_requests"),
            number("failed_requests"));
  PrintText("  fetched      {} in {} requests, {} frames; {} frames copied on the node\n",
            HumanSize(number("fetched_bytes")), number("origin_requests"), number("fetched_frames"),
            number("copied_frames"));
  PrintText("  decompressed {}, written {}\n", HumanSize(number("decompressed_bytes")),
            HumanSize(number("written_bytes")));
  PrintText("  on this node {} of {} frames\n", number("frames_present"), number("frames"));
  PrintText("  latency of reads, p50 / p95 / p99: hits {}, misses {}\n",
            Latency(mount, "hit_latency"), Latency(mount, "miss_latency"));
}

absl::StatusOr<int> Stats(const StatsOptions& options) {
  if (options.all != options.target.empty()) {
    return UsageError(absl::InvalidArgumentError("say either a mount point or --all"));
  }
  std::optional<std::string> target;
  if (!options.all) {
    ASSIGN_OR_RETURN(target, MountPoint(options.target));
  }
  ASSIGN_OR_RETURN(std::string state, StateFor(options.state, target.value_or("")));
  fs::Client client(std::move(state), ProgramPath());
  ASSIGN_OR_RETURN(const json mounts, client.Report(target));
  if (options.json) {
    PrintJson(mounts);
  } else if (mounts.empty()) {
    PrintText("no image is mounted\n");
  } else {
    for (const json& mount : mounts) PrintStats(mount);
  }
  return kExitOk;
}

}  // namespace

void AddMount(CLI::App& app, Action& run) {
  auto options = std::make_shared<MountOptions>();
  CLI::App* command =
      app.add_subcommand("mount", "Mount an image; content is read when it is used");
  command->add_option("image", options->request.image, kImageHelp)->required();
  command->add_option("directory", options->request.target, "Where to mount it")->required();
  command
      ->add_option(
          "--transport", options->transport,
          "erofs: the kernel's EROFS on files served over FUSE (root). fuse: the whole tree "
          "over FUSE. auto: the first that works here")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "erofs", "fuse"}));
  command->add_flag("--loop", options->request.loop,
                    "EROFS through loop devices, as on kernels before 6.12");
  AddLayerOption(*command, options->request.layer_images);
  command->add_flag("--writable", options->request.writable,
                    "Put a writable overlay on top; its changes go at umount");
  command->add_option("--writable-dir", options->request.writable_dir,
                      "Keep the changes of a writable mount in this directory (in upper/)");
  AddRegistryOptions(*command, options->registry);
  AddPrefetchOptions(*command, options->request.prefetch);
  AddStateOption(*command, options->state);
  AddCacheOptions(*command, options->cache);
  command->add_flag("--json", options->json, "Print the mount as JSON");
  command->callback([options, &run] { run = [options] { return Mount(*options); }; });
}

void AddUmount(CLI::App& app, Action& run) {
  auto options = std::make_shared<UmountOptions>();
  CLI::App* command = app.add_subcommand("umount", "Unmount an image");
  command->add_option("directory", options->target, "Where it is mounted")->required();
  AddStateOfMountOption(*command, options->state);
  command->callback([options, &run] { run = [options] { return Umount(*options); }; });
}

void AddStats(CLI::App& app, Action& run) {
  auto options = std::make_shared<StatsOptions>();
  CLI::App* command = app.add_subcommand("stats", "Show what the readers of mounts caused");
  command->add_option("directory", options->target, "Where the image is mounted");
  command->add_flag("--all", options->all, "All mounts of the state directory");
  AddStateOfMountOption(*command, options->state);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &run] { run = [options] { return Stats(*options); }; });
}

}  // namespace lamina::cli
