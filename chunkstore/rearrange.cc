// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/rearrange.h"

#include <algorithm>

namespace lamina::chunkstore {
namespace {

// A frame of whole chunks, or a chunk of whole frames.
struct Unit {
  uint32_t first_frame = 0;
  uint32_t end_frame = 0;
  uint32_t first_chunk = 0;
  uint32_t end_chunk = 0;
  MovedBlocks move;
};

uint32_t EndOf(const FrameRecord& frame) { return frame.first_block + frame.blocks; }

uint32_t EndOf(const ChunkRecord& chunk) {
  return chunk.first_block + (chunk.length + kBlockSize - 1) / kBlockSize;
}

std::vector<Unit> UnitsOf(std::span<const FrameRecord> frames,
                          std::span<const ChunkRecord> chunks) {
  std::vector<Unit> units;
  uint32_t chunk = 0;
  for (uint32_t frame = 0; frame < frames.size();) {
    Unit unit{.first_frame = frame, .first_chunk = chunk};
    uint32_t end = EndOf(frames[frame++]);
    while (chunk < chunks.size() && chunks[chunk].first_block < end) {
      const uint32_t chunk_end = EndOf(chunks[chunk++]);
      while (frame < frames.size() && end < chunk_end) end = EndOf(frames[frame++]);
    }
    unit.end_frame = frame;
    unit.end_chunk = chunk;
    unit.move.from = frames[unit.first_frame].first_block;
    unit.move.blocks = end - unit.move.from;
    units.push_back(unit);
  }
  return units;
}

}  // namespace

Arrangement Arrange(std::span<const FrameRecord> frames, std::span<const ChunkRecord> chunks,
                    std::span<const uint32_t> first) {
  std::vector<Unit> units = UnitsOf(frames, chunks);
  std::vector<uint32_t> unit_of(frames.size());
  for (uint32_t i = 0; i < units.size(); ++i) {
    for (uint32_t frame = units[i].first_frame; frame < units[i].end_frame; ++frame) {
      unit_of[frame] = i;
    }
  }
  std::vector<uint32_t> order;
  std::vector<bool> placed(units.size());
  const auto place = [&](uint32_t unit) {
    if (!placed[unit]) order.push_back(unit);
    placed[unit] = true;
  };
  for (const uint32_t frame : first) {
    if (frame < frames.size()) place(unit_of[frame]);
  }
  const size_t units_in_front = order.size();
  for (uint32_t unit = 0; unit < units.size(); ++unit) place(unit);

  Arrangement arrangement;
  uint32_t block = 0;
  for (size_t position = 0; position < order.size(); ++position) {
    Unit& unit = units[order[position]];
    unit.move.to = block;
    block += unit.move.blocks;
    for (uint32_t i = unit.first_frame; i < unit.end_frame; ++i) arrangement.frames.push_back(i);
    for (uint32_t i = unit.first_chunk; i < unit.end_chunk; ++i) arrangement.chunks.push_back(i);
    if (position < units_in_front) arrangement.in_front += unit.end_frame - unit.first_frame;
  }
  for (const Unit& unit : units) arrangement.moves.push_back(unit.move);
  return arrangement;
}

}  // namespace lamina::chunkstore
