// SPDX-License-Identifier: Apache-2.0
#include <absl/container/flat_hash_set.h>

#include <algorithm>

#include "chunkstore/origin_blob.h"
#include "fs/image/layer_reader.h"
#include "fs/image/verify.h"

namespace lamina::fs {
namespace {

using DigestSet = absl::flat_hash_set<Digest>;

// `seen` has the chunks of all layers below, and gets this layer's.
absl::StatusOr<LayerReport> InspectLayer(const std::shared_ptr<chunkstore::Origin>& origin,
                                         const chunkstore::LayerDescriptor& descriptor,
                                         DigestSet& seen) {
  chunkstore::OriginBlob blob(descriptor, origin);
  ASSIGN_OR_RETURN(const std::unique_ptr<const LayerTables> tables,
                   ReadLayerTables(blob, descriptor));
  LayerReport report{
      .descriptor = descriptor,
      .files = tables->metadata->inode_count(),
      .frames = tables->frames.size(),
      .chunks = tables->chunks.size(),
      .compressed_bytes = tables->sections.frames_length,
      .metadata_bytes = tables->metadata_bytes.bytes().size(),
  };
  for (uint32_t i = 0; i < tables->chunks.size(); ++i) {
    Digest digest;
    std::ranges::copy(tables->chunks[i].digest, digest.bytes.begin());
    report.content_bytes += tables->chunks[i].length;
    // Within a layer a chunk is there once, so a digest that was seen is a lower layer's.
    if (!seen.insert(digest).second) ++report.chunks_in_lower_layers;
  }
  return report;
}

}  // namespace

absl::StatusOr<std::vector<LayerReport>> InspectImage(const Image& image) {
  std::vector<LayerReport> reports;
  DigestSet seen;
  for (size_t i = 0; i < image.layers.size(); ++i) {
    ASSIGN_OR_RETURN(const LayerReport report, InspectLayer(image.origin, image.layers[i], seen),
                     "layer {} {}", i, image.layers[i].digest.ToString());
    reports.push_back(report);
  }
  return reports;
}

}  // namespace lamina::fs
