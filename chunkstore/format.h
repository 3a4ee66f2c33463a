// SPDX-License-Identifier: Apache-2.0
//
// On-disk structures and limits of a layer blob; FORMAT.md describes them in prose. All integers are
// little-endian.
#ifndef LAMINA_CHUNKSTORE_FORMAT_H_
#define LAMINA_CHUNKSTORE_FORMAT_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace lamina::chunkstore {

static_assert(std::endian::native == std::endian::little,
              "the tables are used in place, as they are on disk");

// Unit of the address space; EROFS block size and page size.
inline constexpr uint32_t kBlockSize = 4096;
// A file is one chunk, or is cut into chunks of this size.
inline constexpr uint32_t kChunkSize = 1 << 20;
// Uncompressed bytes in a frame, at most. Small chunks are packed until the next would not fit, a
// chunk that is larger fills several frames of its own.
inline constexpr uint32_t kFrameSize = 256 << 10;
// Limits on what is accepted from outside.
inline constexpr uint64_t kMaxMetadataSize = uint64_t{4} << 30;
inline constexpr uint32_t kMaxFrames = 1 << 28;
// Data and metadata files on a node are padded to this, so that they can be virtio-pmem devices.
inline constexpr uint64_t kFileAlignment = 2 << 20;

struct FrameRecord {
  uint64_t offset;       // of the zstd frame in the object
  uint32_t length;       // of the zstd frame
  uint32_t first_block;  // in the address space
  uint32_t blocks;       // 1 to kFrameSize / kBlockSize
  uint32_t reserved;     // 0
  uint64_t checksum;     // XXH3-64 of the uncompressed bytes, padding included
  uint8_t digest[32];    // SHA-256 of the zstd frame
};
static_assert(sizeof(FrameRecord) == 64);
static_assert(offsetof(FrameRecord, digest) == 32);

struct ChunkRecord {
  uint8_t digest[32];    // SHA-256 of the chunk's bytes, without the padding to a block
  uint32_t first_block;
  uint32_t length;       // bytes, 1 to kChunkSize
};
static_assert(sizeof(ChunkRecord) == 40);
static_assert(offsetof(ChunkRecord, first_block) == 32);

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_FORMAT_H_
