// SPDX-License-Identifier: Apache-2.0
#include "erofs/chunk_map.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "erofs/format.h"

namespace lamina::erofs {
namespace {

uint64_t BlocksOf(uint64_t bytes) { return bytes / kBlockSize + (bytes % kBlockSize != 0); }

absl::Status CheckExtent(const Extent& extent, uint64_t previous_end, uint64_t size,
                         std::span<const Device> devices) {
  const auto invalid = [&](std::string_view why) {
    return absl::InvalidArgumentError(
        fmt::format("extent at {} of {} bytes in block {} of device {}: {}", extent.offset,
                    extent.length, extent.block, extent.device, why));
  };
  if (extent.length == 0) return invalid("empty");
  if (extent.offset % kBlockSize != 0) return invalid("not aligned to blocks");
  if (extent.offset < previous_end) return invalid("overlaps the one before");
  if (extent.offset >= size || extent.length > size - extent.offset) {
    return invalid(fmt::format("past the end of the file, {} bytes", size));
  }
  if (extent.length % kBlockSize != 0 && extent.length != size - extent.offset) {
    return invalid("not a whole number of blocks, and not the end of the file");
  }
  if (extent.device == 0 || extent.device > devices.size()) {
    return invalid(fmt::format("there are devices 1 to {}", devices.size()));
  }
  const uint64_t device_blocks = devices[extent.device - 1].blocks;
  const uint64_t blocks = BlocksOf(extent.length);
  if (extent.block >= device_blocks || blocks > device_blocks - extent.block) {
    return invalid(fmt::format("past the end of the device, {} blocks", device_blocks));
  }
  return absl::OkStatus();
}

}  // namespace

ChunkPlan ShapeOfChunks(const Inode& file) {
  // Everywhere that content starts, ends or jumps on the device must be the start of a chunk. The
  // or of those places, in blocks, has as many low zero bits as chunks may have.
  uint64_t boundaries = 0;
  uint64_t previous_end = 0;
  const Extent* previous = nullptr;
  for (const Extent& extent : file.extents) {
    const bool continues = previous != nullptr && extent.offset == previous_end &&
                           extent.device == previous->device &&
                           extent.block == previous->block + BlocksOf(previous->length);
    if (!continues) boundaries |= previous_end / kBlockSize | extent.offset / kBlockSize;
    previous = &extent;
    previous_end = extent.offset + extent.length;
  }
  if (previous_end < file.size) boundaries |= previous_end / kBlockSize;

  const uint64_t blocks = BlocksOf(file.size);
  const int bits = boundaries == 0 ? std::bit_width(blocks - 1) : std::countr_zero(boundaries);
  ChunkPlan plan;
  plan.block_bits = static_cast<uint8_t>(std::min<int>(bits, kMaxChunkBlockBits));
  plan.entries = ((blocks - 1) >> plan.block_bits) + 1;
  return plan;
}

absl::StatusOr<ChunkPlan> PlanChunks(const Inode& file, std::span<const Device> devices) {
  if (file.size > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return absl::InvalidArgumentError(fmt::format("file size {}", file.size));
  }
  uint64_t previous_end = 0;
  for (const Extent& extent : file.extents) {
    RETURN_IF_ERROR(CheckExtent(extent, previous_end, file.size, devices));
    previous_end = extent.offset + extent.length;
  }
  const ChunkPlan plan = ShapeOfChunks(file);
  if (plan.entries > kMaxChunkEntries) {
    return absl::InvalidArgumentError(
        fmt::format("{} extents in {} bytes are too scattered: {} index entries of {} KiB chunks "
                    "(at most {})",
                    file.extents.size(), file.size, plan.entries, uint64_t{4} << plan.block_bits,
                    kMaxChunkEntries));
  }
  return plan;
}

void WriteChunkIndex(const Inode& file, ChunkPlan plan, std::byte* to) {
  auto extent = file.extents.begin();
  for (uint64_t entry = 0; entry < plan.entries; ++entry) {
    const uint64_t offset = (entry << plan.block_bits) * kBlockSize;
    while (extent != file.extents.end() && extent->offset + extent->length <= offset) ++extent;
    ChunkIndex index = {.block = kNullBlock};
    if (extent != file.extents.end() && extent->offset <= offset) {
      index.device = extent->device;
      index.block = extent->block + static_cast<uint32_t>((offset - extent->offset) / kBlockSize);
    }
    std::memcpy(to + entry * sizeof(index), &index, sizeof(index));
  }
}

}  // namespace lamina::erofs
