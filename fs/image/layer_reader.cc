// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layer_reader.h"

namespace lamina::fs {

absl::StatusOr<std::unique_ptr<const LayerTables>> ReadLayerTables(
    chunkstore::OriginBlob& blob, const chunkstore::LayerDescriptor& descriptor) {
  auto tables = std::make_unique<LayerTables>();
  ASSIGN_OR_RETURN(chunkstore::BlobTables read, blob.ReadTables());
  ASSIGN_OR_RETURN(tables->sections,
                   chunkstore::SectionTable::Parse(AsBytes(read.section_table), descriptor));
  tables->frame_bytes = std::move(read.frames);
  ASSIGN_OR_RETURN(tables->frames,
                   chunkstore::FrameTable::Parse(AsBytes(tables->frame_bytes), tables->sections));
  ASSIGN_OR_RETURN(tables->chunk_bytes, blob.ReadChunkTable(tables->sections));
  ASSIGN_OR_RETURN(tables->chunks, chunkstore::ChunkTable::Parse(AsBytes(tables->chunk_bytes),
                                                                 tables->sections, tables->frames));
  tables->metadata_bytes = std::move(read.metadata);
  ASSIGN_OR_RETURN(tables->metadata, erofs::Reader::Open(AsBytes(tables->metadata_bytes)),
                   "metadata");
  return tables;
}

}  // namespace lamina::fs
