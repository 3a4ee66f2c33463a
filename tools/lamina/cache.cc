// SPDX-License-Identifier: Apache-2.0
//
// `lamina cache`: what the node keeps of images. And the options that say how much that may be, for
// the commands that start an engine.
#include <ctime>
#include <memory>
#include <optional>

#include "fs/engine/client.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"

namespace lamina::cli {
namespace {

using nlohmann::json;

struct Options {
  std::string state;
  std::string image;
  std::string to;
  CacheFlags cache;
  RegistryOptions registry;
  bool off = false;
  bool blobs = false;
  bool json = false;
};

std::string Ago(int64_t seconds) {
  const int64_t age = std::max<int64_t>(std::time(nullptr) - seconds, 0);
  if (seconds == 0) return "-";
  if (age < 120) return fmt::format("{} s ago", age);
  if (age < 2 * 3600) return fmt::format("{} min ago", age / 60);
  if (age < 2 * 86400) return fmt::format("{} h ago", age / 3600);
  return fmt::format("{} days ago", age / 86400);
}

std::string Flags(const json& item, const char* used) {
  std::string text;
  if (item.at(used) == true) text = used;
  if (item.at("pinned") == true) text += text.empty() ? "pinned" : ", pinned";
  return text;
}

std::vector<std::string> Row(std::string name, const json& item, const char* used) {
  return {std::move(name),
          item.at("digest").get<std::string>().substr(0, 19),
          HumanSize(item.at("present_bytes").get<uint64_t>()),
          HumanSize(item.at("content_bytes").get<uint64_t>()),
          Ago(item.at("last_used").get<int64_t>()),
          Flags(item, used)};
}

std::string SizeOrNone(uint64_t bytes) {
  return bytes > uint64_t{1} << 62 ? "no limit" : HumanSize(bytes);
}

void PrintList(const json& report, bool blobs) {
  std::vector<std::vector<std::string>> rows = {
      {blobs ? "blob" : "image", "digest", "present", "of", "last used", ""}};
  if (blobs) {
    for (const json& blob : report.at("blobs")) rows.push_back(Row("", blob, "attached"));
  } else {
    for (json image : report.at("images")) {
      image["digest"] = image.at("manifest_digest");
      rows.push_back(Row(image.at("image").get<std::string>(), image, "mounted"));
    }
  }
  if (blobs) {
    for (auto& row : rows) row.erase(row.begin());
  }
  PrintTable(rows);
  PrintText("{} used, {}\n", HumanSize(report.at("used_bytes").get<uint64_t>()),
            SizeOrNone(report.at("limit_bytes").get<uint64_t>()) +
                (report.at("limit_bytes").get<uint64_t>() > uint64_t{1} << 62 ? "" : " allowed"));
}

void PrintCleanup(const json& cleanup) {
  PrintText("{} freed, {} images and {} blobs removed\n",
            HumanSize(cleanup.at("freed_bytes").get<uint64_t>()),
            cleanup.at("removed_images").get<uint64_t>(),
            cleanup.at("removed_blobs").get<uint64_t>());
}

// With the usual limits, as a mount may come before the engine ends, and then it stays. Until one does
// it evicts nothing (serve.cc).
fs::Client ClientOf(const Options& options) { return {options.state, ProgramPath(), {}}; }

// A digest as it is, a reference as the engine knows it.
absl::StatusOr<std::string> ImageName(const std::string& image) {
  if (image.starts_with("sha256:")) return image;
  return AbsoluteReference(image);
}

absl::StatusOr<int> List(const Options& options) {
  ASSIGN_OR_RETURN(const json report, ClientOf(options).ListCache());
  if (options.json) {
    PrintJson(report);
  } else {
    PrintList(report, options.blobs);
  }
  return kExitOk;
}

absl::StatusOr<int> Clean(const Options& options) {
  std::optional<uint64_t> bytes;
  if (!options.to.empty()) {
    const absl::StatusOr<fs::Amount> amount = fs::ParseAmount(options.to);
    if (!amount.ok()) return UsageError(Annotate(amount.status(), "--to"));
    if (amount->percent != 0) {
      return UsageError(absl::InvalidArgumentError("--to: want bytes, not a percentage"));
    }
    bytes = amount->bytes;
  }
  ASSIGN_OR_RETURN(std::vector<std::string> engine, EngineArguments(options.cache));
  fs::Client client(options.state, ProgramPath(), std::move(engine));
  ASSIGN_OR_RETURN(const json cleanup, client.CleanCache(bytes));
  if (options.json) {
    PrintJson(cleanup);
  } else {
    PrintCleanup(cleanup);
  }
  return kExitOk;
}

absl::StatusOr<int> Pin(const Options& options) {
  ASSIGN_OR_RETURN(const std::string image, ImageName(options.image));
  ASSIGN_OR_RETURN(const registry::Settings settings, ToSettings(options.registry));
  RETURN_IF_ERROR(ClientOf(options).PinImage(image, !options.off, settings));
  if (options.json) PrintJson({{"image", image}, {"pinned", !options.off}});
  return kExitOk;
}

absl::StatusOr<int> Remove(const Options& options) {
  ASSIGN_OR_RETURN(const std::string image, ImageName(options.image));
  ASSIGN_OR_RETURN(const json cleanup, ClientOf(options).RemoveImage(image));
  if (options.json) {
    PrintJson(cleanup);
  } else {
    PrintCleanup(cleanup);
  }
  return kExitOk;
}

CLI::App* Add(CLI::App& parent, Action& run, const char* name, const char* description,
              const std::shared_ptr<Options>& options,
              absl::StatusOr<int> (*function)(const Options&)) {
  CLI::App* command = parent.add_subcommand(name, description);
  AddStateOption(*command, options->state);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback(
      [options, &run, function] { run = [options, function] { return function(*options); }; });
  return command;
}

}  // namespace

void AddCache(CLI::App& app, Action& run) {
  constexpr const char* kImage =
      "oci:DIR[:TAG] or docker://HOST/REPOSITORY[:TAG], or the digest of a manifest";
  auto options = std::make_shared<Options>();
  CLI::App* cache =
      app.add_subcommand("cache", "Show and clean up what this machine keeps of images");
  cache->require_subcommand(1);
  Add(*cache, run, "ls", "List images, with what is present of their content", options, List)
      ->add_flag("--blobs", options->blobs, "List layer blobs instead");
  CLI::App* clean =
      Add(*cache, run, "gc",
          "Evict what was not used for longest down to the limit; remove blobs that no image needs",
          options, Clean);
  clean->add_option("--to", options->to, "Evict down to this size instead, e.g. 20G or 0");
  AddCacheOptions(*clean, options->cache);
  CLI::App* pin =
      Add(*cache, run, "pin", "Keep what is and will be present of an image", options, Pin);
  pin->add_option("image", options->image, kImage)->required();
  pin->add_flag("--off", options->off, "No longer");
  AddRegistryOptions(*pin, options->registry);
  Add(*cache, run, "rm", "Remove an image, unless it is mounted, and what only it needed", options,
      Remove)
      ->add_option("image", options->image, kImage)
      ->required();
}

// For CLI11: what is wrong, or nothing.
static std::string CheckAmount(const std::string& text) {
  return std::string(fs::ParseAmount(text).status().message());
}

void AddCacheOptions(CLI::App& command, CacheFlags& flags) {
  command
      .add_option("--cache", flags.mode,
                  "disk: keep what was read; none: pass it through memory, for origins that are "
                  "as fast as a disk")
      ->capture_default_str()
      ->check(CLI::IsMember({"disk", "none"}));
  command
      .add_option("--cache-size", flags.size,
                  "What the content of all images may take on the disk: e.g. 50G, or 30% of the "
                  "file system")
      ->capture_default_str()
      ->check(CheckAmount);
  command
      .add_option("--cache-free", flags.free,
                  "What must stay free of the file system, likewise: content is evicted if others "
                  "need more")
      ->capture_default_str()
      ->check(CheckAmount);
}

absl::StatusOr<fs::CacheOptions> ParseCacheFlags(const CacheFlags& flags) {
  fs::CacheOptions options;
  ASSIGN_OR_RETURN(options.size, fs::ParseAmount(flags.size), "--cache-size");
  ASSIGN_OR_RETURN(options.free, fs::ParseAmount(flags.free), "--cache-free");
  options.none = flags.mode == "none";
  return options;
}

absl::StatusOr<std::vector<std::string>> EngineArguments(const CacheFlags& flags) {
  RETURN_IF_ERROR(ParseCacheFlags(flags).status());
  return std::vector<std::string>{"--cache=" + flags.mode, "--cache-size=" + flags.size,
                                  "--cache-free=" + flags.free};
}

}  // namespace lamina::cli
