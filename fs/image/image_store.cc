// SPDX-License-Identifier: Apache-2.0
#include "fs/image/image_store.h"

#include <algorithm>
#include <set>
#include <utility>

#include "chunkstore/registry/reference.h"
#include "fs/image/layout.h"
#include "fs/image/registry_store.h"

namespace lamina::fs {
namespace {

using oci::Descriptor;

// Indexes may refer to indexes, the same one many times: this bounds the work for one image.
constexpr int kMaxIndexes = 32;

bool IsIndex(const Descriptor& descriptor) {
  return descriptor.media_type == oci::kIndexType || descriptor.media_type == oci::kDockerIndexType;
}

// BuildKit keeps attestations beside images, as manifests for the platform unknown/unknown.
bool IsImage(const Descriptor& descriptor) {
  const bool is_manifest = descriptor.media_type == oci::kManifestType ||
                           descriptor.media_type == oci::kDockerManifestType;
  return is_manifest && !(descriptor.platform && descriptor.platform->os == "unknown");
}

bool AllTheSame(const std::vector<Descriptor>& manifests) {
  return std::ranges::all_of(manifests,
                             [&](const Descriptor& m) { return m.digest == manifests[0].digest; });
}

std::string ListPlatforms(const std::vector<Descriptor>& manifests) {
  std::set<std::string> platforms;
  for (const Descriptor& manifest : manifests) {
    platforms.insert(manifest.platform ? manifest.platform->ToString() : "(not given)");
  }
  return platforms.empty() ? "nothing" : fmt::format("{}", fmt::join(platforms, ", "));
}

}  // namespace

absl::Status CheckCredentials(std::span<const std::string> references,
                              const registry::Settings& settings) {
  if (std::ranges::none_of(settings.credentials.given,
                           [](const auto& given) { return given.host.empty(); })) {
    return absl::OkStatus();
  }
  std::string first;
  for (const std::string& reference : references) {
    const absl::StatusOr<ImageReference> image = ImageReference::Parse(reference);
    if (!image.ok() || image->transport != ImageTransport::kRegistry) continue;
    const absl::StatusOr<registry::Reference> parsed = registry::Reference::Parse(image->path);
    if (!parsed.ok()) continue;  // nothing is sent anywhere for it
    if (first.empty()) first = parsed->host;
    if (parsed->host != first) {
      return absl::InvalidArgumentError(fmt::format(
          "--creds needs HOST= in front, as the images are in two registries: {} and {}", first,
          parsed->host));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<OpenedStore> OpenStore(const ImageReference& reference,
                                      const RegistryAccess& access) {
  switch (reference.transport) {
    case ImageTransport::kOciLayout: {
      ASSIGN_OR_RETURN(Layout layout, Layout::OpenDirectory(reference.path));
      return OpenedStore{std::make_unique<Layout>(std::move(layout)), reference.name};
    }
    case ImageTransport::kOciArchive: {
      ASSIGN_OR_RETURN(Layout layout, Layout::OpenArchive(reference.path));
      return OpenedStore{std::make_unique<Layout>(std::move(layout)), reference.name};
    }
    case ImageTransport::kRegistry:
      return OpenRegistryStore(reference, access);
    case ImageTransport::kDockerArchive:
    case ImageTransport::kDirectory:
      break;
  }
  return absl::InvalidArgumentError(
      fmt::format("{}: neither an OCI layout nor in a registry", reference.path));
}

absl::StatusOr<std::vector<Descriptor>> CollectManifests(const ImageStore& store,
                                                         std::vector<Descriptor> entries) {
  std::vector<Descriptor> manifests;
  int indexes = 0;
  while (!entries.empty()) {
    const Descriptor entry = std::move(entries.back());
    entries.pop_back();
    if (IsImage(entry)) manifests.push_back(entry);
    if (!IsIndex(entry)) continue;
    if (++indexes > kMaxIndexes) {
      return absl::ResourceExhaustedError(
          fmt::format("an image made of more than {} indexes", kMaxIndexes));
    }
    ASSIGN_OR_RETURN(const std::string text, store.ReadDocument(entry, "index"));
    ASSIGN_OR_RETURN(const oci::Index index, oci::Index::Parse(text));
    entries.insert(entries.end(), index.manifests.begin(), index.manifests.end());
  }
  std::ranges::reverse(manifests);  // they were taken from the end
  return manifests;
}

absl::StatusOr<Descriptor> FindManifest(const ImageStore& store, std::string_view name,
                                        const oci::Platform& platform) {
  ASSIGN_OR_RETURN(const std::vector<Descriptor> entries, store.Find(name));
  ASSIGN_OR_RETURN(const std::vector<Descriptor> manifests, CollectManifests(store, entries), "{}",
                   store.name());
  std::vector<Descriptor> matching = manifests;
  std::erase_if(matching, [&](const Descriptor& manifest) {
    return manifest.platform && !platform.Matches(*manifest.platform);
  });
  if (matching.empty() && AllTheSame(manifests)) matching = manifests;
  if (matching.empty()) {
    return absl::NotFoundError(fmt::format("{}: no image for the platform {}; there is {}",
                                           store.name(), platform.ToString(),
                                           ListPlatforms(manifests)));
  }
  if (!AllTheSame(matching)) {
    return absl::NotFoundError(
        fmt::format("{}: {} images fit the platform {} ({}); name one that only one of them fits",
                    store.name(), matching.size(), platform.ToString(), ListPlatforms(matching)));
  }
  return matching[0];
}

}  // namespace lamina::fs
