// SPDX-License-Identifier: Apache-2.0
//
// Merged metadata of images, kept on the node: one EROFS image of metadata for each OCI image, its
// device table naming the layers' blobs. Whatever the layers say, the kernel is only ever given
// metadata that Lamina's own builder wrote.
#ifndef LAMINA_FS_ENGINE_METADATA_CACHE_H_
#define LAMINA_FS_ENGINE_METADATA_CACHE_H_

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/blob_store.h"
#include "erofs/merge.h"

namespace lamina::fs {

// A metadata file, mapped; it stays usable as long as this lives.
struct MergedMetadata {
  std::string path;
  Mapping mapping;  // of the whole file, which is padded (that of an image to 2 MiB)
};

// The name of the directory in which the metadata of an image with these layers is.
std::string MergedMetadataName(std::span<const chunkstore::LayerDescriptor> layers);

// Where in that one the metadata are.
std::string MetadataPath(const std::string& directory, const std::string& name);

// Returns the metadata of the image that consists of `blobs` (lowest layer first): from
// `<directory>/<name>/` if it is there and undamaged, else by merging and writing it there.
// Any number of threads and processes may do so at once.
absl::StatusOr<std::shared_ptr<const MergedMetadata>> GetMergedMetadata(
    const std::string& directory, const std::vector<std::shared_ptr<chunkstore::Blob>>& blobs);

// The metadata of one layer as overlayfs stacks it on others (erofs/merge.h, ReadLayer): kept in the
// same way.
struct LayerMetadata {
  std::shared_ptr<const MergedMetadata> metadata;
  erofs::LayerMarks marks;
};
std::string LayerMetadataName(const chunkstore::LayerDescriptor& layer);
absl::StatusOr<LayerMetadata> GetLayerMetadata(const std::string& directory,
                                               const std::shared_ptr<chunkstore::Blob>& blob);

// The metadata at the path that an earlier call gave. kNotFound if it is not there, kDataLoss if it
// is damaged.
absl::StatusOr<std::shared_ptr<const MergedMetadata>> OpenMergedMetadata(const std::string& path);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_METADATA_CACHE_H_
