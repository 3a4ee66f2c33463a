// SPDX-License-Identifier: Apache-2.0
#include "fs/image/image_document.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <iterator>
#include <utility>

#include "chunkstore/base/json.h"

namespace lamina::fs {

using nlohmann::json;

ImageDocument MakeDocument(std::string_view type, std::string content) {
  oci::Descriptor descriptor{.media_type = std::string(type),
                             .digest = Digest::Of(AsBytes(content)),
                             .size = content.size()};
  return {.descriptor = std::move(descriptor), .content = std::move(content)};
}

absl::StatusOr<ImageDocument> MakeManifest(ImageWriter& output, const std::string& config_json,
                                           const oci::Platform& platform,
                                           std::vector<oci::Descriptor> layers,
                                           std::map<std::string, std::string> annotations,
                                           const std::optional<oci::Descriptor>& subject) {
  oci::Manifest manifest{
      .media_type = std::string(oci::kManifestType),
      .config = {.media_type = std::string(oci::kConfigType),
                 .digest = Digest::Of(AsBytes(config_json)),
                 .size = config_json.size()},
      .layers = std::move(layers),
      .annotations = std::move(annotations),
  };
  if (subject) {
    manifest.artifact_type = oci::kLaminaImageType;
    manifest.subject = oci::Descriptor{
        .media_type = subject->media_type, .digest = subject->digest, .size = subject->size};
  }
  RETURN_IF_ERROR(output.AddBlob(config_json));
  ImageDocument made = MakeDocument(oci::kManifestType, manifest.ToJson());
  made.descriptor.platform = platform;
  made.descriptor.artifact_type = manifest.artifact_type;
  return made;
}

oci::Descriptor DescribeLayer(const chunkstore::BlobInfo& blob) {
  oci::Descriptor descriptor{
      .media_type = std::string(oci::kLaminaLayerType), .digest = blob.digest, .size = blob.size};
  descriptor.annotations = {
      {std::string(oci::kSectionTableOffsetKey), fmt::format("{}", blob.section_table_offset)},
      {std::string(oci::kSectionTableDigestKey), blob.section_table_digest.ToString()},
  };
  if (blob.hot_frames > 0) {
    descriptor.annotations[std::string(oci::kHotFramesKey)] = fmt::format("{}", blob.hot_frames);
  }
  return descriptor;
}

std::string EmptyConfig(const oci::Platform& platform) {
  json config = {
      {"architecture", platform.architecture},
      {"os", platform.os},
      {"config", json::object()},
      {"rootfs", {{"type", "layers"}, {"diff_ids", json::array()}}},
      {"history", json::array()},
  };
  if (!platform.variant.empty()) config["variant"] = platform.variant;
  return oci::ToCanonicalJson(config);
}

absl::StatusOr<std::string> AddLayers(std::string_view config_json,
                                      const std::vector<LayerHistory>& layers) {
  RETURN_IF_ERROR(oci::ImageConfig::Parse(config_json).status());  // then "rootfs" is an object
  ASSIGN_OR_RETURN(json config, oci::ParseJson(config_json, "image configuration"));
  json& diff_ids = config["rootfs"]["diff_ids"];
  json& history = config["history"];
  // Go programs write null for what is empty.
  if (!diff_ids.is_array()) diff_ids = json::array();
  if (!history.is_array()) history = json::array();
  // Some tools want an entry for each layer, if there are any.
  const auto of_layer = [](const json& entry) {
    return !entry.is_object() || entry.value("empty_layer", json(false)) != json(true);
  };
  for (auto i = std::ranges::count_if(history, of_layer); i < std::ssize(diff_ids); ++i) {
    history.push_back({{"created_by", ""}});
  }
  for (const LayerHistory& layer : layers) {
    diff_ids.push_back(layer.diff_id.ToString());
    json entry = {{"created_by", layer.created_by}};
    if (!layer.created.empty()) config["created"] = entry["created"] = layer.created;
    if (!layer.comment.empty()) entry["comment"] = layer.comment;
    history.push_back(std::move(entry));
  }
  return oci::ToCanonicalJson(config);
}

std::string TimestampNow() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace lamina::fs
