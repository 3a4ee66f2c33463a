// SPDX-License-Identifier: Apache-2.0
#include "fs/image/image.h"

#include <algorithm>

#include "chunkstore/oci_layout_origin.h"
#include "fs/image/layout.h"
#include "fs/image/reference.h"

namespace lamina::fs {
namespace {

absl::Status NotConverted(std::string_view reference) {
  return absl::FailedPreconditionError(
      fmt::format("the image is not converted; run: lamina convert {} oci:DIR:TAG", reference));
}

absl::StatusOr<Image> ReadImage(std::string_view text, const ImageReference& reference,
                                const oci::Platform& platform) {
  Image image{.reference = std::string(text)};
  ASSIGN_OR_RETURN(const Layout layout, Layout::OpenDirectory(reference.path));
  ASSIGN_OR_RETURN(const oci::Descriptor entry, layout.FindManifest(reference.name, platform));
  image.manifest_digest = entry.digest;
  ASSIGN_OR_RETURN(image.manifest_json, layout.ReadDocument(entry, "manifest"));
  ASSIGN_OR_RETURN(image.manifest, oci::Manifest::Parse(image.manifest_json));
  const auto is_lamina = [](const oci::Descriptor& layer) {
    return layer.media_type == oci::kLaminaLayerType;
  };
  const std::vector<oci::Descriptor>& layers = image.manifest.layers;
  if (!std::all_of(layers.begin(), layers.end(), is_lamina)) return NotConverted(text);
  ASSIGN_OR_RETURN(image.config_json,
                   layout.ReadDocument(image.manifest.config, "image configuration"));
  ASSIGN_OR_RETURN(image.config, oci::ImageConfig::Parse(image.config_json));
  if (layers.size() != image.config.diff_ids.size()) {
    return absl::InvalidArgumentError(
        fmt::format("the manifest has {} layers, but the configuration has {} diff_ids",
                    layers.size(), image.config.diff_ids.size()));
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    ASSIGN_OR_RETURN(const chunkstore::LayerDescriptor layer, layers[i].ToLayerDescriptor(),
                     "manifest: layers[{}]", i);
    image.layers.push_back(layer);
  }
  ASSIGN_OR_RETURN(image.origin, chunkstore::OpenOciLayoutOrigin(reference.path));
  return image;
}

}  // namespace

absl::StatusOr<Image> OpenImage(std::string_view reference, const oci::Platform& platform) {
  ASSIGN_OR_RETURN(const ImageReference parsed, ImageReference::ParseLayout(reference));
  absl::StatusOr<Image> image = ReadImage(reference, parsed, platform);
  if (!image.ok()) return Annotate(image.status(), fmt::format("open {}", reference));
  return image;
}

}  // namespace lamina::fs
