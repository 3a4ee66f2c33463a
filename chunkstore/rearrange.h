// SPDX-License-Identifier: Apache-2.0
//
// Another order of a blob's frames, in which some come first.
#ifndef LAMINA_CHUNKSTORE_REARRANGE_H_
#define LAMINA_CHUNKSTORE_REARRANGE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "chunkstore/format.h"

namespace lamina::chunkstore {

// Blocks of an address space that stay together, and where they go.
struct MovedBlocks {
  uint32_t from = 0;
  uint32_t blocks = 0;
  uint32_t to = 0;
  bool operator==(const MovedBlocks&) const = default;
};

struct Arrangement {
  std::vector<uint32_t> frames;    // indices of the old tables in their new order
  std::vector<uint32_t> chunks;    // likewise
  std::vector<MovedBlocks> moves;  // by ascending `from`; they cover the address space
  uint32_t in_front = 0;  // frames that come first because they, or their chunk, were named
};

// A pure function of the tables and `first`, frames in the order in which they are to come; ones that
// do not exist, or were named before, are left out. A chunk of several frames stays together: naming
// one of them names all. The frames and chunks are those of a valid blob.
Arrangement Arrange(std::span<const FrameRecord> frames, std::span<const ChunkRecord> chunks,
                    std::span<const uint32_t> first);

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_REARRANGE_H_
