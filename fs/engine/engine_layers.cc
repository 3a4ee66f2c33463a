// SPDX-License-Identifier: Apache-2.0
//
// Layers that are mounted by themselves.
#include <spdlog/spdlog.h>

#include <utility>

#include "fs/engine/attach.h"
#include "fs/engine/engine_impl.h"
#include "fs/engine/lazy_origin.h"
#include "fs/prefetch/image_prefetch.h"

namespace lamina::fs {

using chunkstore::LayerDescriptor;
using chunkstore::Origin;

// One for all layers of an image, which then share connections and tokens.
std::shared_ptr<Origin> EngineImpl::OriginOfLayers(const std::string& image,
                                                   const registry::Settings& settings) {
  std::lock_guard lock(origins_mutex_);
  std::erase_if(layer_origins_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Origin>& known = layer_origins_[image];
  std::shared_ptr<Origin> origin = known.lock();
  if (origin == nullptr) {
    origin = MakeLazyOrigin(image, [this, image, settings] { return AccessFor(image, settings); });
    known = origin;
  }
  return origin;
}

absl::StatusOr<Image> EngineImpl::OpenImage(const std::string& image,
                                            const registry::Settings& settings) {
  ASSIGN_OR_RETURN(const RegistryAccess access, AccessFor(image, settings));
  return fs::OpenImage(image, oci::Platform::Host(), access);
}

std::vector<absl::StatusOr<AttachedLayer>> EngineImpl::AttachLayers(const Image& image,
                                                                    bool on_others) {
  images_.Use(RecordOf(image));
  std::vector<LayerToAttach> layers;
  for (const LayerDescriptor& layer : image.layers) layers.push_back({layer, image.origin});
  std::vector<absl::StatusOr<AttachedLayer>> results;
  for (const auto& blob : AttachAll(*store_, layers)) {
    if (!blob.ok()) {
      results.emplace_back(blob.status());
      continue;
    }
    // The lowest of all is only ever mounted with its whiteouts applied (merged, if by itself).
    if (results.empty() && !on_others) {
      results.emplace_back(AttachedLayer{*blob, {}});
      continue;
    }
    const auto metadata = GetLayerMetadata(state_ + "/images", *blob);
    if (metadata.ok()) {
      results.emplace_back(AttachedLayer{*blob, metadata->marks});
    } else {
      results.emplace_back(metadata.status());
    }
  }
  return results;
}

std::unique_ptr<Prefetcher::Ticket> EngineImpl::PrefetchStart(
    const Image& image, std::vector<std::shared_ptr<chunkstore::Blob>> blobs) {
  for (const auto& blob : blobs) blob->ShareChunks();
  Prefetcher::Work work{.blobs = std::move(blobs),
                        .stats = std::make_shared<chunkstore::ReadStats>()};
  return prefetcher_.Start(
      std::move(work), [this, image](const std::stop_token& stop, Prefetcher::Work& planned) {
        const absl::Status profile = PlanFromProfile(image, planned);
        if (profile.ok()) return;
        if (!absl::IsNotFound(profile)) {
          spdlog::warn("{}: its profile is not used: {}", image.reference,
                       std::string(profile.message()));
        }
        // Merged only to find the program in: that takes longer than the layers' own metadata.
        const auto metadata = GetMergedMetadata(state_ + "/images", planned.blobs);
        if (!metadata.ok()) return;
        PlanFromEntrypoint(image, (*metadata)->mapping.bytes(), stop, planned);
      });
}

absl::StatusOr<MountState> EngineImpl::PrepareLayers(const LayersRequest& request) {
  if (request.layers.empty() || (request.keep_marks && request.layers.size() != 1)) {
    return absl::InvalidArgumentError("layers to mount: none, or several with their marks");
  }
  const MountRequest as_mount{.image = request.layers[0].image, .target = request.target};
  RETURN_IF_ERROR(CheckRequest(as_mount));
  ASSIGN_OR_RETURN(const Choice choice, ChooseTransport(as_mount));
  MountState mount;
  mount.record.registry = request.registry;
  mount.record.prefetch.enabled = false;  // whoever mounts layers says what is prefetched
  // Without a manifest's digest: what is mounted is no image, and the node's records of images are
  // not to be changed by it.
  mount.record.description = {.image = as_mount.image,
                              .target = request.target,
                              .transport = choice.transport,
                              .loop = choice.loop,
                              .reason = choice.reason};
  std::vector<LayerToAttach> layers;
  std::vector<MountedImage>& images = mount.record.description.layer_images;
  for (const LayerOfImage& layer : request.layers) {
    layers.push_back({layer.layer, OriginOfLayers(layer.image, request.registry)});
    mount.record.layers.push_back(layer.layer);
    const std::string& below = images.empty() ? as_mount.image : images.back().image;
    if (layer.image != below) images.push_back({.image = layer.image});
    if (!images.empty()) ++images.back().layers;
  }
  mount.image_use = images_.UseLayers(mount.record.layers);
  mount.served = std::make_shared<ServedImage>();
  ServedImage& served = *mount.served;
  for (auto& blob : AttachAll(*store_, layers)) {
    RETURN_IF_ERROR(blob.status());
    served.blobs.push_back(*std::move(blob));
  }
  if (request.keep_marks) {
    ASSIGN_OR_RETURN(const LayerMetadata metadata,
                     GetLayerMetadata(state_ + "/images", served.blobs[0]));
    served.metadata = metadata.metadata;
  } else {
    ASSIGN_OR_RETURN(served.metadata, GetMergedMetadata(state_ + "/images", served.blobs));
  }
  mount.record.metadata = served.metadata->path;
  mount.record.metadata_inode = InodeOf(mount.record.metadata);
  served.key = KeyToShare(mount.record);
  served.stats = std::make_shared<chunkstore::ReadStats>();
  return mount;
}

absl::StatusOr<MountDescription> EngineImpl::MountLayers(const LayersRequest& request) {
  ASSIGN_OR_RETURN(MountState mount, PrepareLayers(request), "mount layers at {}", request.target);
  const MountRequest as_mount{.image = mount.record.description.image, .target = request.target};
  return MountPrepared(as_mount, std::move(mount));
}

}  // namespace lamina::fs
