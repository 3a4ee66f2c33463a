// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layer_reader.h"

#include <utility>

#include "fs/image/scratch_file.h"

namespace lamina::fs {

absl::StatusOr<std::unique_ptr<const LayerTables>> ReadLayerTables(
    chunkstore::OriginBlob& blob, const chunkstore::LayerDescriptor& descriptor) {
  auto tables = std::make_unique<LayerTables>();
  ASSIGN_OR_RETURN(const UniqueFd metadata, OpenScratch());
  ASSIGN_OR_RETURN(chunkstore::BlobTables read, blob.ReadTables(metadata.get()));
  ASSIGN_OR_RETURN(tables->sections,
                   chunkstore::SectionTable::Parse(AsBytes(read.section_table), descriptor));
  tables->frame_bytes = std::move(read.frames);
  ASSIGN_OR_RETURN(tables->frames,
                   chunkstore::FrameTable::Parse(AsBytes(tables->frame_bytes), tables->sections));
  tables->chunk_bytes = std::move(read.chunks);
  ASSIGN_OR_RETURN(tables->chunks, chunkstore::ChunkTable::Parse(AsBytes(tables->chunk_bytes),
                                                                 tables->sections, tables->frames));
  ASSIGN_OR_RETURN(tables->metadata_bytes,
                   Mapping::OfFile(metadata.get(), tables->sections.metadata.uncompressed_length,
                                   /*writable=*/false));
  ASSIGN_OR_RETURN(tables->metadata,
                   erofs::Reader::Open(std::as_const(tables->metadata_bytes).bytes()), "metadata");
  return tables;
}

absl::Status CheckDevice(const erofs::Reader& metadata, uint32_t blocks, const Digest& content) {
  if (metadata.devices().size() != 1 || metadata.devices()[0].blocks != blocks) {
    return absl::DataLossError(
        fmt::format("metadata: the device table is not one device of {} blocks", blocks));
  }
  if (metadata.devices()[0].tag != content.Hex()) {
    return absl::DataLossError("metadata: the device's tag is not the digest of the content");
  }
  return absl::OkStatus();
}

}  // namespace lamina::fs
