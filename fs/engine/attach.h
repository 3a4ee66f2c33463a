// SPDX-License-Identifier: Apache-2.0
//
// Attaches layers to a blob store, several at a time: for an origin far away the round trips of many
// layers would add up.
#ifndef LAMINA_FS_ENGINE_ATTACH_H_
#define LAMINA_FS_ENGINE_ATTACH_H_

#include <memory>
#include <span>
#include <vector>

#include "chunkstore/blob_store.h"
#include "fs/image/image.h"

namespace lamina::fs {

struct LayerToAttach {
  chunkstore::LayerDescriptor descriptor;
  std::shared_ptr<chunkstore::Origin> origin;
};
// The results are in the order of `layers`; errors name the layer.
std::vector<absl::StatusOr<std::shared_ptr<chunkstore::Blob>>> AttachAll(
    chunkstore::BlobStore& store, const std::vector<LayerToAttach>& layers);

// The blobs of images that lie on top of each other, lowest first, or the first error.
absl::StatusOr<std::vector<std::shared_ptr<chunkstore::Blob>>> AttachAll(
    chunkstore::BlobStore& store, std::span<const Image> images);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_ATTACH_H_
