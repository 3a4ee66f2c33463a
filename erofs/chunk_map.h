// SPDX-License-Identifier: Apache-2.0
//
// Turns the extents of a file into the chunk index of a chunk-based inode.
#ifndef LAMINA_EROFS_CHUNK_MAP_H_
#define LAMINA_EROFS_CHUNK_MAP_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "erofs/builder.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// Entries of one file's chunk index, at most: more is absurd, and takes 128 MiB.
inline constexpr uint64_t kMaxChunkEntries = uint64_t{1} << 24;

struct ChunkPlan {
  uint8_t block_bits = 0;  // log2 of the blocks of a chunk
  uint64_t entries = 0;
};

// The largest chunk size at which every chunk is contiguous on one device or all hole, so that a
// contiguous file takes one entry. The file must not be empty, its extents must be as Extent demands.
ChunkPlan ShapeOfChunks(const Inode& file);

// The same, checked. Fails with kInvalidArgument if the extents are not as
// Extent demands or leave their device, or if the index would have more than kMaxChunkEntries.
// The file must not be empty.
absl::StatusOr<ChunkPlan> PlanChunks(const Inode& file, std::span<const Device> devices);

// Writes the index, plan.entries * sizeof(ChunkIndex) bytes.
void WriteChunkIndex(const Inode& file, ChunkPlan plan, std::byte* to);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_CHUNK_MAP_H_
