// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "fs/image/image.h"
#include "fs/image/verify.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"

namespace lamina::cli {
namespace {

using nlohmann::json;

struct Options {
  std::string image;
  RegistryOptions registry;
  bool json = false;
};

double Ratio(uint64_t content, uint64_t compressed) {
  return compressed == 0 ? 1.0 : static_cast<double>(content) / static_cast<double>(compressed);
}

json ToJson(const fs::Image& image, const std::vector<fs::LayerReport>& reports) {
  json layers = json::array();
  for (const fs::LayerReport& report : reports) {
    layers.push_back({{"digest", report.descriptor.digest.ToString()},
                      {"bytes", report.descriptor.size},
                      {"files", report.files},
                      {"frames", report.frames},
                      {"chunks", report.chunks},
                      {"chunks_in_lower_layers", report.chunks_in_lower_layers},
                      {"content_bytes", report.content_bytes},
                      {"compressed_bytes", report.compressed_bytes},
                      {"metadata_bytes", report.metadata_bytes},
                      {"ratio", Ratio(report.content_bytes, report.compressed_bytes)}});
  }
  return {{"image", image.reference},
          {"manifest_digest", image.manifest_digest.ToString()},
          {"platform", image.config.platform.ToString()},
          {"layers", layers}};
}

std::vector<std::string> Row(std::string name, const fs::LayerReport& report) {
  return {std::move(name),
          HumanSize(report.descriptor.size),
          fmt::format("{}", report.files),
          HumanSize(report.content_bytes),
          fmt::format("{:.2f}", Ratio(report.content_bytes, report.compressed_bytes)),
          fmt::format("{}", report.frames),
          fmt::format("{}", report.chunks),
          fmt::format("{}", report.chunks_in_lower_layers),
          HumanSize(report.metadata_bytes)};
}

void Print(const fs::Image& image, const std::vector<fs::LayerReport>& reports) {
  PrintText("{}  {}  {}\n\n", image.reference, image.config.platform.ToString(),
            image.manifest_digest.ToString());
  std::vector<std::vector<std::string>> rows = {
      {"layer", "size", "files", "content", "ratio", "frames", "chunks", "in lower", "metadata"}};
  fs::LayerReport total;
  for (const fs::LayerReport& report : reports) {
    rows.push_back(Row(report.descriptor.digest.ToString().substr(0, 19), report));
    total.descriptor.size += report.descriptor.size;
    total.files += report.files;
    total.frames += report.frames;
    total.chunks += report.chunks;
    total.chunks_in_lower_layers += report.chunks_in_lower_layers;
    total.content_bytes += report.content_bytes;
    total.compressed_bytes += report.compressed_bytes;
    total.metadata_bytes += report.metadata_bytes;
  }
  rows.push_back(Row("all", total));
  PrintTable(rows);
}

absl::StatusOr<fs::Image> Open(const Options& options) {
  ASSIGN_OR_RETURN(registry::Settings settings, ToSettings(options.registry));
  return fs::OpenImage(options.image, oci::Platform::Host(), {.settings = std::move(settings)});
}

absl::StatusOr<int> Inspect(const Options& options) {
  RETURN_IF_ERROR(AbsoluteReference(options.image).status());
  ASSIGN_OR_RETURN(const fs::Image image, Open(options));
  ASSIGN_OR_RETURN(const std::vector<fs::LayerReport> reports, fs::InspectImage(image),
                   "inspect {}", options.image);
  if (options.json) {
    PrintJson(ToJson(image, reports));
  } else {
    Print(image, reports);
  }
  return kExitOk;
}

absl::Status VerifyLayers(const fs::Image& image) {
  ProgressLine line;
  return fs::VerifyImage(
      image, [&line](uint64_t done, uint64_t total) { line.Update("checked", done, total); });
}

absl::StatusOr<int> Verify(const Options& options) {
  RETURN_IF_ERROR(AbsoluteReference(options.image).status());
  const absl::StatusOr<fs::Image> image = Open(options);
  json report = {{"image", options.image}};
  if (image.ok()) report["manifest_digest"] = image->manifest_digest.ToString();
  absl::Status status = image.ok() ? VerifyLayers(*image) : image.status();
  // That an image is not there, or its origin not to be reached, says nothing of it.
  const bool of_the_image = image.ok() || absl::IsDataLoss(status);
  if (options.json && of_the_image) {
    report["intact"] = status.ok();
    if (!status.ok()) report["error"] = std::string(status.message());
    PrintJson(report);
  }
  RETURN_IF_ERROR(status, "verify {}", options.image);
  if (!options.json) {
    PrintText("{}: intact ({} layers, {})\n", options.image, image->layers.size(),
              image->manifest_digest.ToString());
  }
  return kExitOk;
}

void Add(CLI::App& app, Action& run, const char* name, const char* description,
         absl::StatusOr<int> (*function)(const Options&)) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(name, description);
  command->add_option("image", options->image, kImageHelp)->required();
  AddRegistryOptions(*command, options->registry);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback(
      [options, &run, function] { run = [options, function] { return function(*options); }; });
}

}  // namespace

void AddInspect(CLI::App& app, Action& run) {
  Add(app, run, "inspect", "Show an image's layers, sizes and sharing", Inspect);
}

void AddVerify(CLI::App& app, Action& run) {
  Add(app, run, "verify", "Check every digest of an image, from the manifest down", Verify);
}

}  // namespace lamina::cli
