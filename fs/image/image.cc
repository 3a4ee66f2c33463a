// SPDX-License-Identifier: Apache-2.0
#include "fs/image/image.h"

#include <algorithm>
#include <set>

#include "chunkstore/registry/reference.h"
#include "fs/image/image_store.h"
#include "fs/image/reference.h"

namespace lamina::fs {
namespace {

absl::Status NotConverted(std::string_view reference) {
  return absl::FailedPreconditionError(
      fmt::format("the image is not converted; run: lamina convert {} oci:DIR:TAG", reference));
}

bool IsConverted(const oci::Manifest& manifest) {
  return std::ranges::all_of(manifest.layers, [](const oci::Descriptor& layer) {
    return layer.media_type == oci::kLaminaLayerType;
  });
}

absl::Status ReadManifest(const ImageStore& store, const oci::Descriptor& entry, Image& image) {
  image.manifest_digest = entry.digest;
  ASSIGN_OR_RETURN(image.manifest_json, store.ReadDocument(entry, "manifest"));
  ASSIGN_OR_RETURN(image.manifest, oci::Manifest::Parse(image.manifest_json));
  return absl::OkStatus();
}

// The newest of the converted images that are attached to the one in `image`, instead of it.
absl::Status ReadAttached(const ImageStore& store, std::string_view reference, Image& image) {
  const Digest original = image.manifest_digest;
  const Digest config = image.manifest.config.digest;
  ASSIGN_OR_RETURN(const std::vector<oci::Descriptor> attached,
                   store.FindReferrers(original, oci::kLaminaImageType));
  if (attached.empty()) return NotConverted(reference);
  RETURN_IF_ERROR(ReadManifest(store, attached.back(), image), "attached to {}",
                  original.ToString());
  // What the server claims to be attached must say so itself, and have the same configuration, which
  // names the content of all layers: or it could be any image.
  const bool belongs = image.manifest.subject && image.manifest.subject->digest == original &&
                       image.manifest.config.digest == config;
  if (!belongs || !IsConverted(image.manifest)) {
    return absl::DataLossError(fmt::format("{} is not a converted image of {}",
                                           attached.back().digest.ToString(), original.ToString()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Image> ReadImage(std::string_view text, const ImageReference& reference,
                                const oci::Platform& platform, const RegistryAccess& access) {
  Image image{.reference = std::string(text)};
  ASSIGN_OR_RETURN(OpenedStore opened, OpenStore(reference, access));
  const ImageStore& store = *opened.store;
  ASSIGN_OR_RETURN(const oci::Descriptor entry, FindManifest(store, opened.name, platform));
  RETURN_IF_ERROR(ReadManifest(store, entry, image));
  if (!IsConverted(image.manifest)) RETURN_IF_ERROR(ReadAttached(store, text, image));
  ASSIGN_OR_RETURN(image.config_json,
                   store.ReadDocument(image.manifest.config, "image configuration"));
  ASSIGN_OR_RETURN(image.config, oci::ImageConfig::Parse(image.config_json));
  const std::vector<oci::Descriptor>& layers = image.manifest.layers;
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
  ASSIGN_OR_RETURN(image.origin, store.OpenOrigin());
  image.store = std::move(opened.store);
  return image;
}

}  // namespace

absl::StatusOr<Image> OpenImage(std::string_view reference, const oci::Platform& platform,
                                const RegistryAccess& access) {
  ASSIGN_OR_RETURN(const ImageReference parsed, ImageReference::ParseConverted(reference));
  absl::StatusOr<Image> image = ReadImage(reference, parsed, platform, access);
  if (!image.ok()) return Annotate(image.status(), fmt::format("open {}", reference));
  return image;
}

absl::StatusOr<std::vector<Image>> OpenImages(std::span<const std::string> references,
                                              const oci::Platform& platform,
                                              const RegistryAccess& access) {
  RETURN_IF_ERROR(CheckCredentials(references, access.settings));
  std::vector<Image> images;
  std::set<Digest> below;
  for (const std::string& reference : references) {
    ASSIGN_OR_RETURN(Image image, OpenImage(reference, platform, access));
    size_t kept = 0;
    for (size_t i = 0; i < image.layers.size(); ++i) {
      if (!images.empty() && below.contains(image.layers[i].Key())) continue;
      image.layers[kept] = image.layers[i];
      image.manifest.layers[kept] = image.manifest.layers[i];
      image.config.diff_ids[kept] = image.config.diff_ids[i];
      ++kept;
    }
    image.layers.resize(kept);
    image.manifest.layers.resize(kept);
    image.config.diff_ids.resize(kept);
    for (const chunkstore::LayerDescriptor& layer : image.layers) below.insert(layer.Key());
    images.push_back(std::move(image));
  }
  return images;
}

absl::StatusOr<std::string> PinReference(std::string_view reference, const Digest& manifest) {
  ASSIGN_OR_RETURN(const ImageReference parsed, ImageReference::ParseConverted(reference));
  if (parsed.transport == ImageTransport::kOciLayout) {
    return fmt::format("oci:{}:{}", parsed.path, manifest.ToString());
  }
  ASSIGN_OR_RETURN(registry::Reference pinned, registry::Reference::Parse(parsed.path));
  pinned.tag.clear();
  pinned.digest = manifest;
  return "docker://" + pinned.ToString();
}

}  // namespace lamina::fs
