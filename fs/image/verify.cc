// SPDX-License-Identifier: Apache-2.0
#include "fs/image/verify.h"

#include <algorithm>

#include "chunkstore/format.h"
#include "chunkstore/origin_blob.h"
#include "erofs/reader.h"
#include "fs/image/layer_reader.h"

namespace lamina::fs {
namespace {

using chunkstore::FrameRecord;
using chunkstore::kBlockSize;

// Compressed bytes read at a time.
constexpr size_t kReadSize = 4 << 20;

using Progress = std::function<void(uint64_t)>;  // gets further bytes checked

// Follows the content through the chunk table: every chunk against its digest, and the rest of its
// last block, which belongs to no chunk, against zero.
class ChunkChecker {
 public:
  explicit ChunkChecker(const chunkstore::ChunkTable& chunks) : chunks_(chunks) {}

  // The next bytes of the address space.
  absl::Status Add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const chunkstore::ChunkRecord& chunk = chunks_[index_];
      const uint64_t padded = (uint64_t{chunk.length} + kBlockSize - 1) / kBlockSize * kBlockSize;
      const bool in_content = position_ < chunk.length;
      const uint64_t end = in_content ? chunk.length : padded;
      const auto piece = bytes.first(std::min<uint64_t>(bytes.size(), end - position_));
      if (in_content) {
        hasher_.Update(piece);
      } else if (!std::ranges::all_of(piece, [](std::byte b) { return b == std::byte{0}; })) {
        return absl::DataLossError(fmt::format("chunk {}: not padded with zeros", index_));
      }
      position_ += piece.size();
      bytes = bytes.subspan(piece.size());
      if (position_ == padded) RETURN_IF_ERROR(FinishChunk(chunk));
    }
    return absl::OkStatus();
  }

  // SHA-256 over the digests of all chunks, once they are through.
  Digest Finish() { return names_.Finish(); }

 private:
  absl::Status FinishChunk(const chunkstore::ChunkRecord& chunk) {
    const Digest actual = hasher_.Finish();
    if (!std::ranges::equal(actual.bytes, chunk.digest)) {
      return absl::DataLossError(
          fmt::format("chunk {} at block {}: digest mismatch", index_, chunk.first_block));
    }
    names_.Update(std::as_bytes(std::span(chunk.digest)));
    position_ = 0;
    ++index_;
    return absl::OkStatus();
  }

  const chunkstore::ChunkTable& chunks_;
  uint32_t index_ = 0;
  uint64_t position_ = 0;  // in the chunk, padding included
  Hasher hasher_;
  Hasher names_;
};

absl::Status CheckMetadata(const LayerTables& tables) {
  const erofs::Reader& reader = *tables.metadata;
  ASSIGN_OR_RETURN(const erofs::Tree tree, erofs::ReadTree(reader));
  for (erofs::InodeIndex i = 0; i < tree.inode_limit(); ++i) {
    for (const erofs::Extent& extent : tree.inode(i).extents) {
      const uint64_t blocks = (extent.length + kBlockSize - 1) / kBlockSize;
      if (extent.device != 1 || extent.block > tables.sections.blocks ||
          blocks > tables.sections.blocks - extent.block) {
        return absl::DataLossError(
            fmt::format("inode {}: content at block {} of device {} does not exist", i,
                        extent.block, extent.device));
      }
    }
  }
  return absl::OkStatus();
}

// Reads and checks one layer from the first byte to the last.
class LayerVerifier {
 public:
  LayerVerifier(chunkstore::OriginBlob& blob, const chunkstore::LayerDescriptor& descriptor,
                const LayerTables& tables, const Progress& progress)
      : blob_(blob), descriptor_(descriptor), tables_(tables), progress_(progress) {}

  absl::Status Run() {
    RETURN_IF_ERROR(CheckFrames());
    // The tables were checked when they were read; their bytes count for the whole object's digest.
    for (uint64_t offset = tables_.sections.frames_length; offset < descriptor_.size;) {
      const uint64_t length = std::min<uint64_t>(kReadSize, descriptor_.size - offset);
      ASSIGN_OR_RETURN(const auto bytes, Read(offset, length));
      offset += bytes.size();
    }
    const Digest actual = hasher_.Finish();
    if (actual == descriptor_.digest) return absl::OkStatus();
    return absl::DataLossError(
        fmt::format("digest mismatch: the content has {}", actual.ToString()));
  }

 private:
  absl::Status CheckFrames() {
    const chunkstore::FrameTable& frames = tables_.frames;
    ChunkChecker chunks(tables_.chunks);
    std::vector<std::byte> content(chunkstore::kFrameSize);
    for (uint32_t next = 0; next < frames.size();) {
      const uint32_t first = next;
      uint64_t length = 0;
      while (next < frames.size() && (length == 0 || length + frames[next].length <= kReadSize)) {
        length += frames[next++].length;
      }
      ASSIGN_OR_RETURN(auto bytes, Read(frames[first].offset, length));
      for (uint32_t i = first; i < next; ++i) {
        const FrameRecord& frame = frames[i];
        const auto into = std::span(content).first(uint64_t{frame.blocks} * kBlockSize);
        RETURN_IF_ERROR(CheckFrame(frame, bytes.first(frame.length), into, chunks),
                        "frame {} at offset {}", i, frame.offset);
        bytes = bytes.subspan(frame.length);
      }
    }
    return CheckDevice(*tables_.metadata, tables_.sections.blocks, chunks.Finish());
  }

  static absl::Status CheckFrame(const FrameRecord& frame, std::span<const std::byte> compressed,
                                 std::span<std::byte> into, ChunkChecker& chunks) {
    RETURN_IF_ERROR(chunkstore::DecodeFrame(frame, compressed, into));
    if (!chunkstore::FrameIsIntact(frame, into)) return absl::DataLossError("checksum mismatch");
    return chunks.Add(into);
  }

  // Reads the next bytes of the object, which also go into its digest. Valid until the next call.
  absl::StatusOr<std::span<const std::byte>> Read(uint64_t offset, uint64_t length) {
    buffer_.resize(length);
    const chunkstore::RangeRead range{offset, buffer_};
    RETURN_IF_ERROR(blob_.Read(std::span(&range, 1)), "{} bytes at {}", length, offset);
    hasher_.Update(buffer_);
    progress_(length);
    return std::span<const std::byte>(buffer_);
  }

  chunkstore::OriginBlob& blob_;
  const chunkstore::LayerDescriptor& descriptor_;
  const LayerTables& tables_;
  const Progress& progress_;
  Hasher hasher_;
  std::vector<std::byte> buffer_;
};

absl::Status VerifyLayer(const std::shared_ptr<chunkstore::Origin>& origin,
                         const chunkstore::LayerDescriptor& descriptor, const Progress& progress) {
  chunkstore::OriginBlob blob(descriptor, origin);
  ASSIGN_OR_RETURN(const std::unique_ptr<const LayerTables> tables,
                   ReadLayerTables(blob, descriptor));
  RETURN_IF_ERROR(CheckMetadata(*tables), "metadata");
  return LayerVerifier(blob, descriptor, *tables, progress).Run();
}

}  // namespace

absl::Status VerifyImage(const Image& image,
                         const std::function<void(uint64_t, uint64_t)>& progress) {
  uint64_t total = image.manifest_json.size() + image.config_json.size();
  for (const chunkstore::LayerDescriptor& layer : image.layers) total += layer.size;
  uint64_t checked = 0;
  const Progress advance = [&](uint64_t bytes) {
    checked += bytes;
    if (progress) progress(checked, total);
  };
  // Manifest and configuration were checked when the image was opened, just before.
  advance(image.manifest_json.size() + image.config_json.size());
  for (size_t i = 0; i < image.layers.size(); ++i) {
    RETURN_IF_ERROR(VerifyLayer(image.origin, image.layers[i], advance), "layer {} {}", i,
                    image.layers[i].digest.ToString());
  }
  return absl::OkStatus();
}

}  // namespace lamina::fs
