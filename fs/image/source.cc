// SPDX-License-Identifier: Apache-2.0
#include "fs/image/source.h"

#include <algorithm>
#include <array>

#include "fs/image/docker_archive.h"

namespace lamina::fs {
namespace {

// image-spec (layer.md) and Docker's manifest v2.2. The compression that a type tells is not used:
// see decompress.h.
constexpr std::array<std::string_view, 8> kLayerTypes = {
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
    "application/vnd.docker.image.rootfs.diff.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar+zstd",
};
// Layers that registries need not hold: their content is wherever their "urls" say.
constexpr std::string_view kOciForeignPrefix =
    "application/vnd.oci.image.layer.nondistributable.v1.tar";
constexpr std::string_view kDockerForeignPrefix =
    "application/vnd.docker.image.rootfs.foreign.diff.tar";

absl::StatusOr<ByteRange> OpenLayer(const ImageStore& store, const oci::Descriptor& layer) {
  const std::string_view type = layer.media_type;
  if (type == oci::kLaminaLayerType) {
    return absl::FailedPreconditionError("already converted: the image can be used as it is");
  }
  if (type.ends_with("+encrypted")) {
    return absl::UnimplementedError("encrypted: decrypt the image first");
  }
  const bool is_foreign =
      type.starts_with(kOciForeignPrefix) || type.starts_with(kDockerForeignPrefix);
  if (!is_foreign && std::find(kLayerTypes.begin(), kLayerTypes.end(), type) == kLayerTypes.end()) {
    return absl::UnimplementedError(
        fmt::format("media type '{}' is not a file system layer", type));
  }
  absl::StatusOr<ByteRange> content = store.OpenBlob(layer);
  if (is_foreign && absl::IsNotFound(content.status())) {
    return absl::UnimplementedError(
        "foreign (non-distributable) layer: its content is not in the image");
  }
  return content;
}

absl::StatusOr<SourceImage> OpenAny(const ImageReference& reference, const oci::Platform& platform,
                                    const RegistryAccess& access) {
  if (reference.transport == ImageTransport::kDockerArchive) {
    return OpenDockerArchive(reference.path, reference.name);
  }
  ASSIGN_OR_RETURN(const OpenedStore opened, OpenStore(reference, access));
  ASSIGN_OR_RETURN(const oci::Descriptor entry, FindManifest(*opened.store, opened.name, platform));
  return ReadSource(*opened.store, entry);
}

}  // namespace

absl::StatusOr<SourceImage> ReadSource(const ImageStore& store, const oci::Descriptor& entry) {
  SourceImage source{.manifest = entry};
  ASSIGN_OR_RETURN(const std::string manifest_json, store.ReadDocument(entry, "manifest"));
  ASSIGN_OR_RETURN(oci::Manifest manifest, oci::Manifest::Parse(manifest_json));
  const std::string_view config_type = manifest.config.media_type;
  if (config_type != oci::kConfigType && config_type != oci::kDockerConfigType) {
    return absl::UnimplementedError(
        fmt::format("not a container image: its configuration is a '{}'", config_type));
  }
  ASSIGN_OR_RETURN(source.config_json, store.ReadDocument(manifest.config, "image configuration"));
  ASSIGN_OR_RETURN(source.config, oci::ImageConfig::Parse(source.config_json));
  if (source.config.diff_ids.size() != manifest.layers.size()) {
    return absl::InvalidArgumentError(
        fmt::format("the manifest has {} layers, the image configuration {}",
                    manifest.layers.size(), source.config.diff_ids.size()));
  }
  for (size_t i = 0; i < manifest.layers.size(); ++i) {
    const Digest& digest = manifest.layers[i].digest;
    ASSIGN_OR_RETURN(ByteRange content, OpenLayer(store, manifest.layers[i]), "layer {} ({})", i,
                     digest.ToString());
    source.layers.push_back({std::move(content), digest, source.config.diff_ids[i]});
  }
  source.annotations = std::move(manifest.annotations);
  return source;
}

absl::StatusOr<SourceImage> OpenSource(const ImageReference& reference,
                                       const std::optional<oci::Platform>& platform,
                                       const RegistryAccess& access) {
  ASSIGN_OR_RETURN(SourceImage source,
                   OpenAny(reference, platform.value_or(oci::Platform::Host()), access));
  if (platform && !platform->Matches(source.config.platform)) {
    return absl::NotFoundError(fmt::format("{}: the image is for {}, not for {}", reference.path,
                                           source.config.platform.ToString(),
                                           platform->ToString()));
  }
  return source;
}

}  // namespace lamina::fs
