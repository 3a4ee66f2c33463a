// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/blob_tables.h"

#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

namespace lamina::chunkstore {
namespace {

template <typename... Args>
absl::Status Damaged(fmt::format_string<Args...> format, Args&&... args) {
  return absl::DataLossError(fmt::format(format, std::forward<Args>(args)...));
}

Digest ToDigest(const uint8_t (&bytes)[32]) {
  Digest digest;
  std::memcpy(digest.bytes.data(), bytes, sizeof(bytes));
  return digest;
}

absl::Status CheckDigest(const Digest& expected, std::span<const std::byte> bytes) {
  const Digest actual = Digest::Of(bytes);
  if (actual == expected) return absl::OkStatus();
  return Damaged("digest is {}, expected {}", actual.ToString(), expected.ToString());
}

uint32_t BlocksOf(uint64_t bytes) {
  return static_cast<uint32_t>((bytes + kBlockSize - 1) / kBlockSize);
}

// A section has to begin at `*position`, which is moved behind it.
absl::StatusOr<Section> ParseSection(const SectionRecord& record, uint64_t table_offset,
                                     uint64_t* position) {
  if (record.offset != *position) {
    return Damaged("offset is {}, but what comes before it ends at {}", record.offset, *position);
  }
  if (record.length > table_offset - *position) {
    return Damaged("length {} reaches past the section table at {}", record.length, table_offset);
  }
  if ((record.flags & ~kSectionCompressed) != 0) {
    return Damaged("flags {:#x} are not known", record.flags);
  }
  if (record.reserved != 0) return Damaged("reserved field is {}, not 0", record.reserved);
  const bool compressed = (record.flags & kSectionCompressed) != 0;
  if (!compressed && record.uncompressed_length != record.length) {
    return Damaged("uncompressed length is {}, but {} bytes are stored as they are",
                   record.uncompressed_length, record.length);
  }
  *position += record.length;
  return Section{.offset = record.offset,
                 .length = record.length,
                 .uncompressed_length = record.uncompressed_length,
                 .compressed = compressed,
                 .digest = ToDigest(record.digest)};
}

absl::Status CheckMetadataSize(const Section& metadata) {
  const uint64_t size = metadata.uncompressed_length;
  if (size > kMaxMetadataSize) {
    return Damaged("uncompressed length is {}, more than the {} allowed", size, kMaxMetadataSize);
  }
  // The quotient cannot overflow as the product might.
  if (const uint64_t ratio = MaxMetadataRatio(size); size / ratio > metadata.length) {
    return Damaged("uncompressed length is {}, more than {} times the {} bytes stored", size, ratio,
                   metadata.length);
  }
  return absl::OkStatus();
}

// A table of `record_size`-byte records, each of which covers 1 to `max_blocks` of `blocks`.
absl::Status CheckTableSize(const Section& table, uint64_t record_size, uint32_t max_blocks,
                            uint32_t blocks) {
  if (table.compressed) return Damaged("is compressed, which tables must not be");
  if (table.length % record_size != 0) {
    return Damaged("length {} is not a multiple of {}", table.length, record_size);
  }
  const uint64_t records = table.length / record_size;
  if (records > blocks || records * max_blocks < blocks) {
    return Damaged("{} records cannot cover {} blocks", records, blocks);
  }
  return absl::OkStatus();
}

// The bytes of a section as records in place.
template <typename Record>
absl::StatusOr<std::span<const Record>> AsRecords(std::span<const std::byte> bytes,
                                                  const Section& section) {
  if (bytes.size() != section.uncompressed_length) {
    return Damaged("{} bytes, but the section table says {}", bytes.size(),
                   section.uncompressed_length);
  }
  if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(Record) != 0) {
    return absl::InvalidArgumentError(
        fmt::format("bytes are not aligned to {} in memory", alignof(Record)));
  }
  return std::span(reinterpret_cast<const Record*>(bytes.data()), bytes.size() / sizeof(Record));
}

// Where the next frame of the table has to begin.
struct FramePosition {
  uint64_t offset = 0;
  uint64_t block = 0;
};

absl::Status CheckFrame(const FrameRecord& frame, const SectionTable& sections,
                        FramePosition* position) {
  if (frame.offset != position->offset) {
    return Damaged("offset is {}, but the frame before it ends at {}", frame.offset,
                   position->offset);
  }
  if (frame.length == 0 || frame.length > kMaxFrameLength) {
    return Damaged("length is {}, not 1 to {}", frame.length, kMaxFrameLength);
  }
  if (frame.length > sections.frames_length - position->offset) {
    return Damaged("length {} reaches past the end of the frames at {}", frame.length,
                   sections.frames_length);
  }
  if (frame.first_block != position->block) {
    return Damaged("first block is {}, but the frame before it ends at {}", frame.first_block,
                   position->block);
  }
  if (frame.blocks == 0 || frame.blocks > kBlocksPerFrame) {
    return Damaged("has {} blocks, not 1 to {}", frame.blocks, kBlocksPerFrame);
  }
  if (frame.blocks > sections.blocks - position->block) {
    return Damaged("its {} blocks reach past the end of the address space at {}", frame.blocks,
                   sections.blocks);
  }
  if (frame.reserved != 0) return Damaged("reserved field is {}, not 0", frame.reserved);
  position->offset += frame.length;
  position->block += frame.blocks;
  return absl::OkStatus();
}

absl::Status CheckChunk(const ChunkRecord& chunk, uint32_t blocks, uint64_t* position) {
  if (chunk.first_block != *position) {
    return Damaged("first block is {}, but the chunk before it ends at {}", chunk.first_block,
                   *position);
  }
  if (chunk.length == 0 || chunk.length > kChunkSize) {
    return Damaged("length is {}, not 1 to {}", chunk.length, kChunkSize);
  }
  if (BlocksOf(chunk.length) > blocks - *position) {
    return Damaged("length {} reaches past the end of the address space at block {}", chunk.length,
                   blocks);
  }
  *position += BlocksOf(chunk.length);
  return absl::OkStatus();
}

// Both tables tile the address space, so it is enough that no chunk has a frame border inside it
// unless it begins and ends at one. `*frame` is the frame that holds the chunk's first block, and
// moves to the one that holds the block behind the chunk.
absl::Status CheckChunkInFrames(const ChunkRecord& chunk, const FrameTable& frames,
                                uint32_t* frame) {
  const uint64_t end = uint64_t{chunk.first_block} + BlocksOf(chunk.length);
  const auto frame_end = [&] {
    return uint64_t{frames[*frame].first_block} + frames[*frame].blocks;
  };
  const bool whole_frames = frames[*frame].first_block == chunk.first_block && frame_end() <= end;
  while (frame_end() < end && whole_frames) ++*frame;
  if (frame_end() < end || (whole_frames && frame_end() > end)) {
    return Damaged("blocks {} to {} are neither inside one frame nor a number of whole frames",
                   chunk.first_block, end - 1);
  }
  if (frame_end() == end) ++*frame;
  return absl::OkStatus();
}

// What a zstd frame (RFC 8878, section 3.1.1) says in its header is checked before anything is
// decompressed: its content has exactly `content_size` bytes, its window is at most `max_window`,
// and it ends where `bytes` end.
absl::Status CheckZstdFrame(std::span<const std::byte> bytes, uint64_t content_size,
                            uint64_t max_window) {
  constexpr std::array<std::byte, 4> kZstdMagic = {std::byte{0x28}, std::byte{0xB5},
                                                   std::byte{0x2F}, std::byte{0xFD}};
  constexpr std::byte kSingleSegment{0x20};
  constexpr size_t kMinFrame = 9;  // magic, descriptor, window or content size, one block header
  if (bytes.size() < kMinFrame || !std::ranges::equal(bytes.first(4), kZstdMagic)) {
    return Damaged("not a zstd frame");
  }
  const unsigned long long declared = ZSTD_getFrameContentSize(bytes.data(), bytes.size());
  if (declared == ZSTD_CONTENTSIZE_UNKNOWN || declared == ZSTD_CONTENTSIZE_ERROR) {
    return Damaged("zstd frame does not say how long its content is");
  }
  if (declared != content_size) {
    return Damaged("zstd frame holds {} bytes, expected {}", declared, content_size);
  }
  // Without a window of its own a frame needs its content's size (section 3.1.1.1.2).
  if ((bytes[4] & kSingleSegment) == std::byte{0}) {
    const unsigned descriptor = std::to_integer<unsigned>(bytes[5]);
    const uint64_t base = uint64_t{1} << (10 + (descriptor >> 3));
    const uint64_t window = base + base / 8 * (descriptor & 7);
    if (window > max_window) {
      return Damaged("zstd frame needs a window of {} bytes, more than the {} allowed", window,
                     max_window);
    }
  }
  const size_t length = ZSTD_findFrameCompressedSize(bytes.data(), bytes.size());
  if (ZSTD_isError(length)) return Damaged("zstd frame: {}", ZSTD_getErrorName(length));
  if (length != bytes.size()) {
    return Damaged("zstd frame is followed by {} further bytes", bytes.size() - length);
  }
  return absl::OkStatus();
}

// The content of the frame, which has `size` bytes, a piece at a time.
absl::Status DecompressTo(std::span<const std::byte> bytes, uint64_t size,
                          const std::function<absl::Status(std::span<const std::byte>)>& sink) {
  struct Free {
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };
  constexpr size_t kPiece = 256 << 10;
  const std::unique_ptr<ZSTD_DCtx, Free> context(ZSTD_createDCtx());
  if (context == nullptr) return absl::ResourceExhaustedError("no memory for a zstd context");
  ZSTD_DCtx_setParameter(context.get(), ZSTD_d_windowLogMax, std::bit_width(kMaxWindowSize - 1));
  std::vector<std::byte> piece(std::clamp<uint64_t>(size, 1, kPiece));
  ZSTD_inBuffer input{bytes.data(), bytes.size(), 0};
  uint64_t done = 0;
  for (size_t left = 1; left != 0;) {
    ZSTD_outBuffer output{piece.data(), piece.size(), 0};
    left = ZSTD_decompressStream(context.get(), &output, &input);
    if (ZSTD_isError(left)) return Damaged("decompress: {}", ZSTD_getErrorName(left));
    done += output.pos;
    if (output.pos == 0 && left != 0 && input.pos == input.size) {
      return Damaged("decompress: {} bytes of {}", done, size);
    }
    if (done > size) return Damaged("decompress: more than the {} bytes expected", size);
    RETURN_IF_ERROR(sink(std::span(piece).first(output.pos)));
  }
  if (done != size) return Damaged("decompress: {} bytes of {}", done, size);
  return absl::OkStatus();
}

// `into` gets the whole content of the frame.
absl::Status Decompress(std::span<const std::byte> bytes, std::span<std::byte> into) {
  struct Free {
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };
  // A context costs more to set up than a frame to decompress, so each thread keeps one.
  thread_local const std::unique_ptr<ZSTD_DCtx, Free> context(ZSTD_createDCtx());
  if (context == nullptr) return absl::ResourceExhaustedError("no memory for a zstd context");
  const size_t size =
      ZSTD_decompressDCtx(context.get(), into.data(), into.size(), bytes.data(), bytes.size());
  if (ZSTD_isError(size)) return Damaged("decompress: {}", ZSTD_getErrorName(size));
  if (size != into.size()) return Damaged("decompress: {} bytes of {}", size, into.size());
  return absl::OkStatus();
}

}  // namespace

Digest LayerDescriptor::Key() const {
  Hasher hasher;
  hasher.Update(std::as_bytes(std::span(digest.bytes)));
  hasher.Update(std::as_bytes(std::span(section_table_digest.bytes)));
  return hasher.Finish();
}

absl::StatusOr<SectionTable> SectionTable::Parse(std::span<const std::byte> bytes,
                                                 const LayerDescriptor& descriptor) {
  constexpr std::string_view kContext = "section table";
  const uint64_t table_offset = descriptor.section_table_offset;
  if (descriptor.size < sizeof(SectionTableRecord) ||
      table_offset != descriptor.size - sizeof(SectionTableRecord)) {
    return Damaged("{}: descriptor has it at {} of {} bytes, not {} bytes before the end", kContext,
                   table_offset, descriptor.size, sizeof(SectionTableRecord));
  }
  if (bytes.size() != sizeof(SectionTableRecord)) {
    return Damaged("{}: {} bytes, not {}", kContext, bytes.size(), sizeof(SectionTableRecord));
  }
  RETURN_IF_ERROR(CheckDigest(descriptor.section_table_digest, bytes), "{}", kContext);
  SectionTableRecord record;
  std::memcpy(&record, bytes.data(), sizeof(record));

  if (record.magic != kMagic) return Damaged("{}: wrong magic number", kContext);
  if (record.version != kVersion) {
    return absl::UnimplementedError(
        fmt::format("{}: format version {}, only {} is known", kContext, record.version, kVersion));
  }
  if (record.reserved != 0) {
    return Damaged("{}: reserved field is {}, not 0", kContext, record.reserved);
  }
  if (record.frames_length > table_offset) {
    return Damaged("{}: frames length {} reaches past the section table at {}", kContext,
                   record.frames_length, table_offset);
  }
  SectionTable table{.blocks = record.blocks, .frames_length = record.frames_length};
  uint64_t position = record.frames_length;
  ASSIGN_OR_RETURN(table.chunk_table, ParseSection(record.chunk_table, table_offset, &position),
                   "{}: chunk table", kContext);
  ASSIGN_OR_RETURN(table.metadata, ParseSection(record.metadata, table_offset, &position),
                   "{}: metadata", kContext);
  ASSIGN_OR_RETURN(table.frame_table, ParseSection(record.frame_table, table_offset, &position),
                   "{}: frame table", kContext);
  if (position != table_offset) {
    return Damaged("{}: sections end at {}, but it begins at {}", kContext, position, table_offset);
  }
  RETURN_IF_ERROR(
      CheckTableSize(table.chunk_table, sizeof(ChunkRecord), kBlocksPerChunk, table.blocks),
      "{}: chunk table", kContext);
  RETURN_IF_ERROR(CheckMetadataSize(table.metadata), "{}: metadata", kContext);
  RETURN_IF_ERROR(
      CheckTableSize(table.frame_table, sizeof(FrameRecord), kBlocksPerFrame, table.blocks),
      "{}: frame table", kContext);
  if (table.frame_table.length / sizeof(FrameRecord) > kMaxFrames) {
    return Damaged("{}: frame table: more than {} records", kContext, kMaxFrames);
  }
  return table;
}

absl::StatusOr<std::string> DecodeSection(const Section& section, std::string_view name,
                                          std::span<const std::byte> bytes) {
  if (bytes.size() != section.length) {
    return Damaged("{}: {} bytes, but the section table says {}", name, bytes.size(),
                   section.length);
  }
  RETURN_IF_ERROR(CheckDigest(section.digest, bytes), "{}", name);
  if (!section.compressed) {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  RETURN_IF_ERROR(CheckZstdFrame(bytes, section.uncompressed_length, kMaxWindowSize), "{}", name);
  std::string content(section.uncompressed_length, '\0');
  RETURN_IF_ERROR(Decompress(bytes, std::as_writable_bytes(std::span(content))), "{}", name);
  return content;
}

absl::Status DecodeSectionTo(const Section& section, std::string_view name,
                             std::span<const std::byte> bytes,
                             const std::function<absl::Status(std::span<const std::byte>)>& sink) {
  if (bytes.size() != section.length) {
    return Damaged("{}: {} bytes, but the section table says {}", name, bytes.size(),
                   section.length);
  }
  RETURN_IF_ERROR(CheckDigest(section.digest, bytes), "{}", name);
  if (!section.compressed) return sink(bytes);
  RETURN_IF_ERROR(CheckZstdFrame(bytes, section.uncompressed_length, kMaxWindowSize), "{}", name);
  return Annotate(DecompressTo(bytes, section.uncompressed_length, sink), name);
}

Digest ContentDigest(std::span<const std::byte> chunk_table) {
  Hasher hasher;
  for (; chunk_table.size() >= sizeof(ChunkRecord);
       chunk_table = chunk_table.subspan(sizeof(ChunkRecord))) {
    hasher.Update(chunk_table.subspan(offsetof(ChunkRecord, digest), sizeof(ChunkRecord::digest)));
  }
  return hasher.Finish();
}

absl::StatusOr<FrameTable> FrameTable::Parse(std::span<const std::byte> bytes,
                                             const SectionTable& sections) {
  FrameTable table;
  ASSIGN_OR_RETURN(table.frames_, AsRecords<FrameRecord>(bytes, sections.frame_table),
                   "frame table");
  FramePosition position;
  for (size_t i = 0; i < table.frames_.size(); ++i) {
    RETURN_IF_ERROR(CheckFrame(table.frames_[i], sections, &position), "frame {}", i);
    while (table.starts_.size() * kBlocksPerFrame < position.block) {
      table.starts_.push_back(static_cast<uint32_t>(i));
    }
  }
  if (position.block != sections.blocks) {
    return Damaged("frame table: frames cover {} blocks, the address space has {}", position.block,
                   sections.blocks);
  }
  if (position.offset != sections.frames_length) {
    return Damaged("frame table: frames end at {}, the section table says {}", position.offset,
                   sections.frames_length);
  }
  return table;
}

uint32_t FrameTable::Find(uint32_t block) const {
  uint32_t frame = starts_[block / kBlocksPerFrame];
  while (block - frames_[frame].first_block >= frames_[frame].blocks) ++frame;
  return frame;
}

absl::StatusOr<ChunkTable> ChunkTable::Parse(std::span<const std::byte> bytes,
                                             const SectionTable& sections,
                                             const FrameTable& frames) {
  ChunkTable table;
  ASSIGN_OR_RETURN(table.chunks_, AsRecords<ChunkRecord>(bytes, sections.chunk_table),
                   "chunk table");
  uint64_t position = 0;
  uint32_t frame = 0;
  for (size_t i = 0; i < table.chunks_.size(); ++i) {
    RETURN_IF_ERROR(CheckChunk(table.chunks_[i], sections.blocks, &position), "chunk {}", i);
    RETURN_IF_ERROR(CheckChunkInFrames(table.chunks_[i], frames, &frame), "chunk {}", i);
  }
  if (position != sections.blocks) {
    return Damaged("chunk table: chunks cover {} blocks, the address space has {}", position,
                   sections.blocks);
  }
  return table;
}

uint32_t ChunkTable::Find(uint32_t block) const {
  const auto after = std::ranges::upper_bound(chunks_, block, {}, &ChunkRecord::first_block);
  return static_cast<uint32_t>(after - chunks_.begin()) - 1;
}

absl::Status DecodeFrame(const FrameRecord& frame, std::span<const std::byte> compressed,
                         std::span<std::byte> into) {
  if (compressed.size() != frame.length || into.size() != uint64_t{frame.blocks} * kBlockSize) {
    return absl::InvalidArgumentError(
        fmt::format("frame of {} bytes and {} blocks: given {} bytes and room for {}", frame.length,
                    frame.blocks, compressed.size(), into.size()));
  }
  RETURN_IF_ERROR(CheckDigest(ToDigest(frame.digest), compressed));
  RETURN_IF_ERROR(CheckZstdFrame(compressed, into.size(), kFrameSize));
  return Decompress(compressed, into);
}

bool FrameIsIntact(const FrameRecord& frame, std::span<const std::byte> uncompressed) {
  return uncompressed.size() == uint64_t{frame.blocks} * kBlockSize &&
         XXH3_64bits(uncompressed.data(), uncompressed.size()) == frame.checksum;
}

}  // namespace lamina::chunkstore
