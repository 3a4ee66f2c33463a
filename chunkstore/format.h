// SPDX-License-Identifier: Apache-2.0
//
// On-disk structures and limits of a layer blob; FORMAT.md describes them in prose. All integers
// are little-endian.
#ifndef LAMINA_CHUNKSTORE_FORMAT_H_
#define LAMINA_CHUNKSTORE_FORMAT_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

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
inline constexpr uint32_t kBlocksPerFrame = kFrameSize / kBlockSize;  // at most
inline constexpr uint32_t kBlocksPerChunk = kChunkSize / kBlockSize;  // at most
// Blocks of an address space, at most: block numbers and their count fit 32 bits (16 TiB).
inline constexpr uint32_t kMaxBlocks = UINT32_MAX;

// Limits on what is accepted from outside.
inline constexpr uint64_t kMaxMetadataSize = uint64_t{4} << 30;
// Metadata that claims to be larger than kFreeMetadataSize must be at most kMaxMetadataRatio times
// its compressed size, and if larger than kLargeMetadataSize at most kMaxLargeMetadataRatio times:
// real metadata is 3 to 20 times, a bomb up to 30,000 times.
inline constexpr uint64_t kMaxMetadataRatio = 256;
inline constexpr uint64_t kFreeMetadataSize = 16 << 20;
inline constexpr uint64_t kMaxLargeMetadataRatio = 64;
inline constexpr uint64_t kLargeMetadataSize = 256 << 20;
// How many times its compressed size metadata of `size` bytes may be.
constexpr uint64_t MaxMetadataRatio(uint64_t size) {
  if (size <= kFreeMetadataSize) return UINT64_MAX;
  return size <= kLargeMetadataSize ? kMaxMetadataRatio : kMaxLargeMetadataRatio;
}
// Stored bytes of a section: they are held in memory whole while they are checked, so this bounds what
// a hostile image can ask for. The frame table of a blob of 4 TiB is as large.
inline constexpr uint64_t kMaxSectionLength = 1 << 30;
// zstd window that a reader must provide for metadata, at most.
inline constexpr uint64_t kMaxWindowSize = 8 << 20;
inline constexpr uint32_t kMaxFrames = 1 << 28;
// A compressed frame, at most: what zstd needs for data that do not compress.
inline constexpr uint32_t kMaxFrameLength = kFrameSize + kFrameSize / 256;

// Data and metadata files on a node are padded to this, so that they can be virtio-pmem devices.
inline constexpr uint64_t kFileAlignment = 2 << 20;
constexpr uint64_t PaddedFileSize(uint64_t size) {
  return (size + kFileAlignment - 1) / kFileAlignment * kFileAlignment;
}

struct FrameRecord {
  uint64_t offset;       // of the zstd frame in the object
  uint32_t length;       // of the zstd frame
  uint32_t first_block;  // in the address space
  uint32_t blocks;       // 1 to kBlocksPerFrame
  uint32_t reserved;     // 0
  uint64_t checksum;     // XXH3-64 of the uncompressed bytes, padding included
  uint8_t digest[32];    // SHA-256 of the zstd frame
};
static_assert(sizeof(FrameRecord) == 64);
static_assert(offsetof(FrameRecord, offset) == 0);
static_assert(offsetof(FrameRecord, length) == 8);
static_assert(offsetof(FrameRecord, first_block) == 12);
static_assert(offsetof(FrameRecord, blocks) == 16);
static_assert(offsetof(FrameRecord, reserved) == 20);
static_assert(offsetof(FrameRecord, checksum) == 24);
static_assert(offsetof(FrameRecord, digest) == 32);
static_assert(std::is_trivially_copyable_v<FrameRecord>);

struct ChunkRecord {
  uint8_t digest[32];    // SHA-256 of the chunk's bytes, without the padding to a block
  uint32_t first_block;  // in the address space
  uint32_t length;       // bytes, 1 to kChunkSize
};
static_assert(sizeof(ChunkRecord) == 40);
static_assert(offsetof(ChunkRecord, digest) == 0);
static_assert(offsetof(ChunkRecord, first_block) == 32);
static_assert(offsetof(ChunkRecord, length) == 36);
static_assert(std::is_trivially_copyable_v<ChunkRecord>);

// The bytes of a section are one zstd frame. Only metadata may have it: digests do not compress.
inline constexpr uint32_t kSectionCompressed = 1;

struct SectionRecord {
  uint64_t offset;               // in the object
  uint64_t length;               // in the object
  uint64_t uncompressed_length;  // == length without kSectionCompressed
  uint32_t flags;                // kSectionCompressed or 0
  uint32_t reserved;             // 0
  uint8_t digest[32];            // SHA-256 of the bytes in the object
};
static_assert(sizeof(SectionRecord) == 64);
static_assert(offsetof(SectionRecord, offset) == 0);
static_assert(offsetof(SectionRecord, length) == 8);
static_assert(offsetof(SectionRecord, uncompressed_length) == 16);
static_assert(offsetof(SectionRecord, flags) == 24);
static_assert(offsetof(SectionRecord, reserved) == 28);
static_assert(offsetof(SectionRecord, digest) == 32);
static_assert(std::is_trivially_copyable_v<SectionRecord>);

inline constexpr std::array<uint8_t, 8> kMagic = {'L', 'A', 'M', 'I', 'N', 'A', '\r', '\n'};
inline constexpr uint32_t kVersion = 1;

// The last bytes of the object.
struct SectionTableRecord {
  std::array<uint8_t, 8> magic;  // kMagic
  uint32_t version;              // kVersion
  uint32_t blocks;               // length of the address space
  uint64_t frames_length;        // the frames fill the object from 0 to here
  uint64_t reserved;             // 0
  // In the order of their offsets, without gaps.
  SectionRecord chunk_table;
  SectionRecord metadata;
  SectionRecord frame_table;
};
static_assert(sizeof(SectionTableRecord) == 224);
static_assert(offsetof(SectionTableRecord, magic) == 0);
static_assert(offsetof(SectionTableRecord, version) == 8);
static_assert(offsetof(SectionTableRecord, blocks) == 12);
static_assert(offsetof(SectionTableRecord, frames_length) == 16);
static_assert(offsetof(SectionTableRecord, reserved) == 24);
static_assert(offsetof(SectionTableRecord, chunk_table) == 32);
static_assert(offsetof(SectionTableRecord, metadata) == 96);
static_assert(offsetof(SectionTableRecord, frame_table) == 160);
static_assert(std::is_trivially_copyable_v<SectionTableRecord>);

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_FORMAT_H_
