// SPDX-License-Identifier: Apache-2.0
//
// All tables of a layer blob and its metadata, read from an origin, verified and parsed.
#ifndef LAMINA_FS_IMAGE_LAYER_READER_H_
#define LAMINA_FS_IMAGE_LAYER_READER_H_

#include <memory>
#include <string>

#include "chunkstore/blob_tables.h"
#include "chunkstore/origin_blob.h"
#include "erofs/reader.h"

namespace lamina::fs {

// Immutable; any number of threads. The tables and the reader refer to the strings.
struct LayerTables {
  std::string frame_bytes;
  std::string chunk_bytes;
  std::string metadata_bytes;

  chunkstore::SectionTable sections;
  chunkstore::FrameTable frames;
  chunkstore::ChunkTable chunks;
  std::optional<erofs::Reader> metadata;  // always there once read
};

// On the heap, so that the strings stay where they are.
absl::StatusOr<std::unique_ptr<const LayerTables>> ReadLayerTables(
    chunkstore::OriginBlob& blob, const chunkstore::LayerDescriptor& descriptor);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_LAYER_READER_H_
