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

// Immutable; any number of threads. The tables and the reader refer to the bytes.
struct LayerTables {
  std::string frame_bytes;
  std::string chunk_bytes;
  Mapping metadata_bytes;  // of a file without a name

  chunkstore::SectionTable sections;
  chunkstore::FrameTable frames;
  chunkstore::ChunkTable chunks;
  std::optional<erofs::Reader> metadata;  // always there once read
};

// On the heap, so that the strings stay where they are.
absl::StatusOr<std::unique_ptr<const LayerTables>> ReadLayerTables(
    chunkstore::OriginBlob& blob, const chunkstore::LayerDescriptor& descriptor);

// Whether a layer's metadata have the device that they must have: one of so many blocks, whose tag is
// the blob's content digest.
absl::Status CheckDevice(const erofs::Reader& metadata, uint32_t blocks, const Digest& content);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_LAYER_READER_H_
