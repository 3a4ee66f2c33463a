// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/attach.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

namespace lamina::fs {
namespace {

// Layers that are attached at the same time.
constexpr size_t kAttachThreads = 8;

}  // namespace

using chunkstore::Blob;
using chunkstore::BlobStore;

std::vector<absl::StatusOr<std::shared_ptr<Blob>>> AttachAll(
    BlobStore& store, const std::vector<LayerToAttach>& layers) {
  std::vector<absl::StatusOr<std::shared_ptr<Blob>>> results(layers.size(),
                                                             absl::UnknownError("not attached"));
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < results.size(); i = next++) {
      results[i] = store.Attach(layers[i].descriptor, layers[i].origin);
      if (!results[i].ok()) {
        results[i] = Annotate(results[i].status(),
                              fmt::format("layer {}", layers[i].descriptor.digest.ToString()));
      }
    }
  };
  std::vector<std::jthread> helpers;  // joined below
  for (size_t i = 1; i < std::min(results.size(), kAttachThreads); ++i) helpers.emplace_back(work);
  work();
  helpers.clear();
  return results;
}

absl::StatusOr<std::vector<std::shared_ptr<Blob>>> AttachAll(BlobStore& store,
                                                             std::span<const Image> images) {
  std::vector<LayerToAttach> layers;
  for (const Image& image : images) {
    for (const auto& layer : image.layers) layers.push_back({layer, image.origin});
  }
  std::vector<std::shared_ptr<Blob>> blobs;
  for (auto& blob : AttachAll(store, layers)) {
    RETURN_IF_ERROR(blob.status());
    blobs.push_back(*std::move(blob));
  }
  return blobs;
}

}  // namespace lamina::fs
