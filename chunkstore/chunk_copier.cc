// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/chunk_copier.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace lamina::chunkstore {
namespace {

// Sharing costs a transaction of the file system (XFS flushes the source first), so small pieces
// are better written.
constexpr uint64_t kMinShared = 64 << 10;

uint64_t WholeBlocks(uint64_t bytes) { return (bytes + kBlockSize - 1) / kBlockSize * kBlockSize; }

uint64_t EndBlock(const ChunkRecord& chunk) {
  return chunk.first_block + WholeBlocks(chunk.length) / kBlockSize;
}

// Cheaper than finding it out with SHA-256. File systems that know no holes say all is data.
bool IsHole(int fd, uint64_t offset, uint64_t length) {
  if (::lseek(fd, static_cast<off_t>(offset), SEEK_DATA) != static_cast<off_t>(offset)) return true;
  const off_t hole = ::lseek(fd, static_cast<off_t>(offset), SEEK_HOLE);
  return hole < static_cast<off_t>(offset + length);
}

}  // namespace

ChunkCopier::FrameRange ChunkCopier::FramesOfChunk(const ChunkTable& chunks,
                                                   const FrameTable& frames, uint32_t frame) {
  const ChunkRecord& chunk = chunks[chunks.Find(frames[frame].first_block)];
  const uint64_t end =
      std::max(uint64_t{frames[frame].first_block} + frames[frame].blocks, EndBlock(chunk));
  return {frames.Find(chunk.first_block), frames.Find(static_cast<uint32_t>(end - 1)) + 1};
}

std::optional<ChunkCopier::Piece> ChunkCopier::Find(const Digest& key, const ChunkRecord& chunk,
                                                    const DataReaders& readers) {
  Digest chunk_digest;
  std::memcpy(chunk_digest.bytes.data(), chunk.digest, sizeof(chunk.digest));
  const auto locations = index_->FindChunk(chunk_digest, key);
  if (!locations.ok()) return std::nullopt;
  for (const NodeIndex::ChunkLocation& location : *locations) {
    if (location.length != chunk.length || !readers.MayCopyFrom(location.blob)) continue;
    Piece piece{.source = uint64_t{location.first_block} * kBlockSize,
                .target = uint64_t{chunk.first_block} * kBlockSize,
                .length = WholeBlocks(chunk.length)};
    auto file = OpenFile(fmt::format("{}/{}/data", directory_, location.blob.Hex()), O_RDONLY);
    if (!file.ok() || IsHole(file->get(), piece.source, piece.length)) continue;
    piece.file = std::make_shared<const UniqueFd>(std::move(*file));
    return piece;
  }
  return std::nullopt;
}

bool ChunkCopier::ReadAndCheck(const ChunkRecord& chunk, const Piece& piece,
                               std::span<std::byte> into) {
  if (!ReadFull(piece.file->get(), piece.source, into).ok()) return false;
  const Digest digest = Digest::Of(into.first(chunk.length));
  return std::memcmp(digest.bytes.data(), chunk.digest, sizeof(chunk.digest)) == 0;
}

absl::StatusOr<uint64_t> ChunkCopier::Put(const Piece& piece, std::span<const std::byte> bytes,
                                          int fd) {
  if (piece.length >= kMinShared && can_share_blocks_.load(std::memory_order_relaxed)) {
    file_clone_range range{.src_fd = piece.file->get(),
                           .src_offset = piece.source,
                           .src_length = piece.length,
                           .dest_offset = piece.target};
    if (::ioctl(fd, FICLONERANGE, &range) == 0) return 0;
    if (errno == EOPNOTSUPP || errno == ENOTTY || errno == EXDEV || errno == EINVAL) {
      can_share_blocks_.store(false, std::memory_order_relaxed);
    }
  }
  RETURN_IF_ERROR(WriteFull(fd, piece.target, bytes));
  return bytes.size();
}

bool ChunkCopier::MayHave(const Digest& key, const ChunkTable& chunks, const FrameTable& frames,
                          uint32_t frame, const DataReaders& readers) {
  return Find(key, chunks[chunks.Find(frames[frame].first_block)], readers).has_value();
}

absl::StatusOr<uint64_t> ChunkCopier::Copy(const Digest& key, const ChunkTable& chunks,
                                           uint32_t frame, FrameRange range, LocalBlob& blob,
                                           const DataReaders& readers,
                                           std::span<std::byte> buffer) {
  const absl::Status not_there = absl::NotFoundError("no other blob has the chunk");
  // The frame, or the larger chunk that it is a part of, from `begin` to before `end`.
  const FrameTable& frames = blob.frames();
  const FrameRange whole = FramesOfChunk(chunks, frames, frame);
  const uint32_t first_chunk = chunks.Find(frames[frame].first_block);
  const uint32_t begin = frames[whole.first].first_block;
  const uint64_t end = uint64_t{frames[whole.end - 1].first_block} + frames[whole.end - 1].blocks;

  std::vector<Piece> pieces;
  for (uint32_t i = first_chunk; i < chunks.size() && chunks[i].first_block < end; ++i) {
    std::optional<Piece> piece = Find(key, chunks[i], readers);
    if (!piece.has_value()) return not_there;
    pieces.push_back(std::move(*piece));
  }
  const uint64_t base = uint64_t{begin} * kBlockSize;
  const auto bytes_of = [&](uint64_t target, uint64_t length) {
    return buffer.subspan(target - base, length);
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    const ChunkRecord& chunk = chunks[first_chunk + static_cast<uint32_t>(i)];
    const std::span<std::byte> bytes = bytes_of(pieces[i].target, pieces[i].length);
    if (!ReadAndCheck(chunk, pieces[i], bytes)) return not_there;
  }
  // The chunks are right; this checks the padding between them.
  for (uint32_t i = range.first; i < range.end; ++i) {
    const FrameRecord& record = frames[i];
    const uint64_t offset = uint64_t{record.first_block} * kBlockSize;
    if (!FrameIsIntact(record, bytes_of(offset, uint64_t{record.blocks} * kBlockSize))) {
      return not_there;
    }
  }
  // Of a chunk that is larger than a frame, the part in `range`.
  const uint64_t range_begin = uint64_t{frames[range.first].first_block} * kBlockSize;
  const FrameRecord& last = frames[range.end - 1];
  const uint64_t range_end = (uint64_t{last.first_block} + last.blocks) * kBlockSize;
  uint64_t written = 0;
  for (Piece& piece : pieces) {
    const uint64_t from = std::max(piece.target, range_begin);
    const uint64_t to = std::min(piece.target + piece.length, range_end);
    piece.source += from - piece.target;
    piece.target = from;
    piece.length = to - from;
    ASSIGN_OR_RETURN(const uint64_t put,
                     Put(piece, bytes_of(piece.target, piece.length), blob.data_fd()));
    written += put;
  }
  for (uint32_t i = range.first; i < range.end; ++i) blob.MarkPresent(i);
  return written;
}

}  // namespace lamina::chunkstore
