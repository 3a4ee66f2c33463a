// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/mount_record.h"

#include <nlohmann/json.hpp>

#include "fs/engine/messages.h"
#include "fs/engine/prefetch_messages.h"

namespace lamina::fs {
namespace {

using chunkstore::LayerDescriptor;
using nlohmann::json;
using Phase = MountRecord::Phase;

constexpr std::pair<Phase, const char*> kPhases[] = {
    {Phase::kMounting, "mounting"}, {Phase::kMounted, "mounted"}, {Phase::kDetached, "detached"}};

json ToJson(const LayerDescriptor& layer) {
  return {{"digest", layer.digest.ToString()},
          {"size", layer.size},
          {"section_table_offset", layer.section_table_offset},
          {"section_table_digest", layer.section_table_digest.ToString()}};
}

absl::StatusOr<LayerDescriptor> ParseLayer(const json& object) {
  LayerDescriptor layer;
  ASSIGN_OR_RETURN(const std::string digest, StringField(object, "digest"));
  ASSIGN_OR_RETURN(layer.digest, Digest::Parse(digest));
  ASSIGN_OR_RETURN(layer.size, NumberField(object, "size"));
  ASSIGN_OR_RETURN(layer.section_table_offset, NumberField(object, "section_table_offset"));
  ASSIGN_OR_RETURN(const std::string table, StringField(object, "section_table_digest"));
  ASSIGN_OR_RETURN(layer.section_table_digest, Digest::Parse(table));
  return layer;
}

absl::StatusOr<Phase> ParsePhase(std::string_view text) {
  for (const auto& [phase, name] : kPhases) {
    if (text == name) return phase;
  }
  return absl::InvalidArgumentError(fmt::format("phase '{}' is not known", text));
}

absl::StatusOr<MountRecord> Parse(const json& object) {
  MountRecord record;
  ASSIGN_OR_RETURN(const std::string phase, StringField(object, "phase"));
  ASSIGN_OR_RETURN(record.phase, ParsePhase(phase));
  ASSIGN_OR_RETURN(record.description, ParseMountDescription(object));
  ASSIGN_OR_RETURN(record.writable_dir, StringField(object, "writable_dir"));
  ASSIGN_OR_RETURN(record.token, StringField(object, "token"));
  // Fields that are added must not be missed: records may be of an older version.
  if (const auto registry = object.find("registry"); registry != object.end()) {
    ASSIGN_OR_RETURN(record.registry, ParseRegistrySettings(*registry));
  }
  if (const auto prefetch = object.find("prefetch"); prefetch != object.end()) {
    ASSIGN_OR_RETURN(record.prefetch, ParsePrefetchOptions(*prefetch));
  }
  if (object.contains("served_image")) {
    ASSIGN_OR_RETURN(record.served_image, NumberField(object, "served_image"));
    ASSIGN_OR_RETURN(record.metadata_inode, NumberField(object, "metadata_inode"));
    if (record.served_image > MountRecord::kMaxServedImage) {
      return absl::InvalidArgumentError("field 'served_image' is out of range");
    }
  }
  ASSIGN_OR_RETURN(record.kernel_id, NumberField(object, "kernel_id"));
  ASSIGN_OR_RETURN(record.metadata, StringField(object, "metadata"));
  ASSIGN_OR_RETURN(record.fuse_state, StringField(object, "fuse_state"));
  const auto layers = object.find("layers");
  if (layers == object.end() || !layers->is_array()) {
    return absl::InvalidArgumentError("field 'layers' is not an array");
  }
  for (const json& layer : *layers) {
    ASSIGN_OR_RETURN(const LayerDescriptor descriptor, ParseLayer(layer));
    record.layers.push_back(descriptor);
  }
  return record;
}

}  // namespace

std::vector<std::string> ImagesOfLayers(const MountRecord& record) {
  std::vector<std::string> images(record.layers.size(), record.description.image);
  size_t end = images.size();
  for (auto image = record.description.layer_images.rbegin();
       image != record.description.layer_images.rend(); ++image) {
    for (uint64_t i = 0; i < image->layers && end > 0; ++i) images[--end] = image->image;
  }
  return images;
}

std::string SerializeMountRecord(const MountRecord& record) {
  json object = ToJson(record.description);
  for (const auto& [phase, name] : kPhases) {
    if (phase == record.phase) object["phase"] = name;
  }
  object["writable_dir"] = record.writable_dir;
  object["token"] = record.token;
  object["registry"] = ToJson(record.registry, Secrets::kLeftOut);
  object["prefetch"] = ToJson(record.prefetch);
  object["served_image"] = record.served_image;
  object["metadata_inode"] = record.metadata_inode;
  object["kernel_id"] = record.kernel_id;
  object["metadata"] = record.metadata;
  object["fuse_state"] = record.fuse_state;
  object["layers"] = json::array();
  for (const LayerDescriptor& layer : record.layers) object["layers"].push_back(ToJson(layer));
  // Paths need not be UTF-8, which JSON is: as binary they are kept byte by byte.
  const std::vector<uint8_t> bytes = json::to_cbor(object);
  return std::string(bytes.begin(), bytes.end());
}

// Also without `allow_exceptions` it throws for an array of more elements than memory could have.
static json FromCbor(std::string_view text) {
  try {
    return json::from_cbor(text, /*strict=*/true, /*allow_exceptions=*/false);
  } catch (const json::exception&) {
    return json(json::value_t::discarded);
  }
}

absl::StatusOr<MountRecord> ParseMountRecord(std::string_view text) {
  absl::StatusOr<MountRecord> record = Parse(FromCbor(text));
  if (record.ok()) return record;
  return absl::DataLossError(
      fmt::format("mount record: {}", std::string(record.status().message())));
}

}  // namespace lamina::fs
