// SPDX-License-Identifier: Apache-2.0
#include "fs/image/oci.h"

#include <charconv>
#include <limits>

#include "chunkstore/base/json.h"

namespace lamina::oci {
namespace {

using nlohmann::json;

absl::StatusOr<Platform> ParsePlatform(const Field& field) {
  Platform platform;
  ASSIGN_OR_RETURN(const Field os, field.Get("os"));
  ASSIGN_OR_RETURN(platform.os, os.String());
  ASSIGN_OR_RETURN(const Field architecture, field.Get("architecture"));
  ASSIGN_OR_RETURN(platform.architecture, architecture.String());
  ASSIGN_OR_RETURN(platform.variant, field.OptionalString("variant"));
  return platform;
}

absl::StatusOr<Descriptor> ParseDescriptor(const Field& field) {
  Descriptor descriptor;
  ASSIGN_OR_RETURN(const Field media_type, field.Get("mediaType"));
  ASSIGN_OR_RETURN(descriptor.media_type, media_type.String());
  ASSIGN_OR_RETURN(const Field digest, field.Get("digest"));
  ASSIGN_OR_RETURN(descriptor.digest, digest.AsDigest());
  ASSIGN_OR_RETURN(const Field size, field.Get("size"));
  ASSIGN_OR_RETURN(descriptor.size, size.Size());
  ASSIGN_OR_RETURN(descriptor.annotations, field.OptionalStringMap("annotations"));
  ASSIGN_OR_RETURN(const std::optional<Field> platform, field.Find("platform"));
  if (platform) {
    ASSIGN_OR_RETURN(descriptor.platform, ParsePlatform(*platform));
  }
  ASSIGN_OR_RETURN(descriptor.artifact_type, field.OptionalString("artifactType"));
  return descriptor;
}

absl::StatusOr<std::vector<Descriptor>> ParseDescriptors(const Field& list) {
  ASSIGN_OR_RETURN(const std::vector<Field> elements, list.Elements());
  std::vector<Descriptor> descriptors;
  descriptors.reserve(elements.size());
  for (const Field& element : elements) {
    ASSIGN_OR_RETURN(Descriptor descriptor, ParseDescriptor(element));
    descriptors.push_back(std::move(descriptor));
  }
  return descriptors;
}

json PlatformToJson(const Platform& platform) {
  json value = {{"architecture", platform.architecture}, {"os", platform.os}};
  if (!platform.variant.empty()) value["variant"] = platform.variant;
  return value;
}

json DescriptorToJson(const Descriptor& descriptor) {
  json value = {{"mediaType", descriptor.media_type},
                {"digest", descriptor.digest.ToString()},
                {"size", descriptor.size}};
  if (!descriptor.annotations.empty()) value["annotations"] = descriptor.annotations;
  if (descriptor.platform) value["platform"] = PlatformToJson(*descriptor.platform);
  if (!descriptor.artifact_type.empty()) value["artifactType"] = descriptor.artifact_type;
  return value;
}

json DescriptorsToJson(const std::vector<Descriptor>& descriptors) {
  json list = json::array();
  for (const Descriptor& descriptor : descriptors) list.push_back(DescriptorToJson(descriptor));
  return list;
}

// The checks that keep a manifest from being read as an index or the reverse: the version is 2, the
// media type, which OCI documents may leave out, is one of two, and the other's list is not there.
absl::Status CheckKind(const Field& document, std::string_view oci_type,
                       std::string_view docker_type, std::string_view list_of_other_kind) {
  ASSIGN_OR_RETURN(const Field version, document.Get("schemaVersion"));
  ASSIGN_OR_RETURN(const uint64_t number, version.Size());
  if (number != 2) return version.Error(fmt::format("{} is not supported, only 2 is", number));
  ASSIGN_OR_RETURN(const std::string type, document.OptionalString("mediaType"));
  if (!type.empty() && type != oci_type && type != docker_type) {
    return document.Error(fmt::format("mediaType: '{}' is not '{}'", type, oci_type));
  }
  ASSIGN_OR_RETURN(const std::optional<Field> other, document.Find(list_of_other_kind));
  if (other) {
    return document.Error(
        fmt::format("has '{}', which makes it ambiguous what it is", list_of_other_kind));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ParseDecimal(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return absl::InvalidArgumentError(fmt::format("'{}' is not a decimal number", text));
  }
  return value;
}

absl::StatusOr<std::string> GetAnnotation(const Descriptor& descriptor, std::string_view key) {
  const auto annotation = descriptor.annotations.find(std::string(key));
  if (annotation == descriptor.annotations.end()) {
    return absl::FailedPreconditionError(fmt::format("has no annotation '{}'", key));
  }
  return annotation->second;
}

absl::StatusOr<chunkstore::LayerDescriptor> ReadLayerAnnotations(const Descriptor& descriptor) {
  ASSIGN_OR_RETURN(const std::string offset_text,
                   GetAnnotation(descriptor, kSectionTableOffsetKey));
  ASSIGN_OR_RETURN(const std::string digest_text,
                   GetAnnotation(descriptor, kSectionTableDigestKey));
  chunkstore::LayerDescriptor layer{.digest = descriptor.digest, .size = descriptor.size};
  ASSIGN_OR_RETURN(layer.section_table_offset, ParseDecimal(offset_text), "annotation '{}'",
                   kSectionTableOffsetKey);
  ASSIGN_OR_RETURN(layer.section_table_digest, Digest::Parse(digest_text), "annotation '{}'",
                   kSectionTableDigestKey);
  if (layer.section_table_offset >= layer.size) {
    return absl::InvalidArgumentError(
        fmt::format("annotation '{}': {} is outside the layer of {} bytes", kSectionTableOffsetKey,
                    layer.section_table_offset, layer.size));
  }
  return layer;
}

}  // namespace

uint32_t Descriptor::HotFrames() const {
  const absl::StatusOr<std::string> text = GetAnnotation(*this, kHotFramesKey);
  if (!text.ok()) return 0;
  const absl::StatusOr<uint64_t> frames = ParseDecimal(*text);
  const bool can_be = frames.ok() && *frames <= std::numeric_limits<uint32_t>::max();
  return can_be ? static_cast<uint32_t>(*frames) : 0;
}

absl::StatusOr<chunkstore::LayerDescriptor> Descriptor::ToLayerDescriptor() const {
  if (media_type != kLaminaLayerType) {
    return absl::FailedPreconditionError(fmt::format(
        "layer {}: media type '{}' is not '{}'", digest.ToString(), media_type, kLaminaLayerType));
  }
  ASSIGN_OR_RETURN(const chunkstore::LayerDescriptor layer, ReadLayerAnnotations(*this), "layer {}",
                   digest.ToString());
  return layer;
}

absl::StatusOr<Manifest> Manifest::Parse(std::string_view json) {
  ASSIGN_OR_RETURN(const nlohmann::json value, ParseJson(json, "manifest"));
  const Field document(value, "manifest");
  RETURN_IF_ERROR(CheckKind(document, kManifestType, kDockerManifestType, "manifests"));
  Manifest manifest;
  ASSIGN_OR_RETURN(manifest.media_type, document.OptionalString("mediaType"));
  if (manifest.media_type.empty()) manifest.media_type = kManifestType;
  ASSIGN_OR_RETURN(const Field config, document.Get("config"));
  ASSIGN_OR_RETURN(manifest.config, ParseDescriptor(config));
  ASSIGN_OR_RETURN(const Field layers, document.Get("layers"));
  ASSIGN_OR_RETURN(manifest.layers, ParseDescriptors(layers));
  if (manifest.layers.size() > kMaxLayers) {
    return layers.Error(fmt::format("{} layers, more than the {} that overlayfs can stack",
                                    manifest.layers.size(), kMaxLayers));
  }
  ASSIGN_OR_RETURN(manifest.annotations, document.OptionalStringMap("annotations"));
  ASSIGN_OR_RETURN(manifest.artifact_type, document.OptionalString("artifactType"));
  ASSIGN_OR_RETURN(const std::optional<Field> subject, document.Find("subject"));
  if (subject) {
    ASSIGN_OR_RETURN(manifest.subject, ParseDescriptor(*subject));
  }
  return manifest;
}

std::string Manifest::ToJson() const {
  json value = {{"schemaVersion", 2},
                {"mediaType", media_type},
                {"config", DescriptorToJson(config)},
                {"layers", DescriptorsToJson(layers)}};
  if (!artifact_type.empty()) value["artifactType"] = artifact_type;
  if (subject) value["subject"] = DescriptorToJson(*subject);
  if (!annotations.empty()) value["annotations"] = annotations;
  return ToCanonicalJson(value);
}

absl::StatusOr<Index> Index::Parse(std::string_view json) {
  ASSIGN_OR_RETURN(const nlohmann::json value, ParseJson(json, "index"));
  const Field document(value, "index");
  RETURN_IF_ERROR(CheckKind(document, kIndexType, kDockerIndexType, "layers"));
  Index index;
  // "manifests": null is how some tools write the index of an empty layout.
  ASSIGN_OR_RETURN(const std::optional<Field> manifests, document.Find("manifests"));
  if (!manifests && !value.contains("manifests")) return document.Error("'manifests' is missing");
  if (manifests) {
    ASSIGN_OR_RETURN(index.manifests, ParseDescriptors(*manifests));
  }
  ASSIGN_OR_RETURN(index.annotations, document.OptionalStringMap("annotations"));
  return index;
}

std::string Index::ToJson() const {
  json value = {
      {"schemaVersion", 2}, {"mediaType", kIndexType}, {"manifests", DescriptorsToJson(manifests)}};
  if (!annotations.empty()) value["annotations"] = annotations;
  return ToCanonicalJson(value);
}

bool IsManifestOrIndex(std::string_view type) {
  return type == kManifestType || type == kDockerManifestType || type == kIndexType ||
         type == kDockerIndexType;
}

absl::StatusOr<std::string> DocumentType(std::string_view json) {
  ASSIGN_OR_RETURN(const nlohmann::json value, ParseJson(json, "manifest"));
  ASSIGN_OR_RETURN(std::string type, Field(value, "manifest").OptionalString("mediaType"));
  if (IsManifestOrIndex(type)) return type;
  return absl::UnimplementedError(
      fmt::format("neither an image manifest nor an index: it says that it is a '{}'", type));
}

absl::StatusOr<std::string> ReplaceInIndex(std::string_view index_json, const Descriptor& manifest,
                                           const std::set<Digest>& superseded) {
  ASSIGN_OR_RETURN(const Index index, Index::Parse(index_json));
  const auto name_of = [](const Descriptor& descriptor) {
    const auto name = descriptor.annotations.find(std::string(kRefNameKey));
    return name == descriptor.annotations.end() ? std::string() : name->second;
  };
  ASSIGN_OR_RETURN(json value, ParseJson(index_json, "index"));
  json kept = json::array();
  for (size_t i = 0; i < index.manifests.size(); ++i) {
    const Descriptor& entry = index.manifests[i];
    const bool named = entry.artifact_type.empty() && manifest.artifact_type.empty();
    const bool replaced = entry.digest == manifest.digest && !named;
    if (named && name_of(entry) == name_of(manifest)) continue;
    if (!replaced && !superseded.contains(entry.digest)) kept.push_back(value["manifests"][i]);
  }
  kept.push_back(DescriptorToJson(manifest));
  value["manifests"] = std::move(kept);
  return ToCanonicalJson(value);
}

absl::StatusOr<ImageConfig> ImageConfig::Parse(std::string_view json) {
  ASSIGN_OR_RETURN(const nlohmann::json value, ParseJson(json, "image configuration"));
  const Field document(value, "image configuration");
  ImageConfig config;
  ASSIGN_OR_RETURN(config.platform, ParsePlatform(document));
  ASSIGN_OR_RETURN(const Field rootfs, document.Get("rootfs"));
  ASSIGN_OR_RETURN(const Field type, rootfs.Get("type"));
  ASSIGN_OR_RETURN(const std::string type_name, type.String());
  if (type_name != "layers") return type.Error(fmt::format("'{}' is not 'layers'", type_name));
  // An image without layers may have null here.
  ASSIGN_OR_RETURN(const std::optional<Field> diff_ids, rootfs.Find("diff_ids"));
  if (diff_ids) {
    ASSIGN_OR_RETURN(const std::vector<Field> elements, diff_ids->Elements());
    for (const Field& element : elements) {
      ASSIGN_OR_RETURN(const Digest diff_id, element.AsDigest());
      config.diff_ids.push_back(diff_id);
    }
  }
  ASSIGN_OR_RETURN(const std::optional<Field> process, document.Find("config"));
  if (!process) return config;
  ASSIGN_OR_RETURN(config.entrypoint, process->OptionalStrings("Entrypoint"));
  ASSIGN_OR_RETURN(config.command, process->OptionalStrings("Cmd"));
  ASSIGN_OR_RETURN(config.environment, process->OptionalStrings("Env"));
  ASSIGN_OR_RETURN(config.working_directory, process->OptionalString("WorkingDir"));
  ASSIGN_OR_RETURN(config.user, process->OptionalString("User"));
  return config;
}

}  // namespace lamina::oci
