// SPDX-License-Identifier: Apache-2.0
//
// The tables of a layer blob: how to open one and find things in it (FORMAT.md). Everything parsed
// here comes from outside: parsing checks all of it, so that users of a parsed table need not. What
// is damaged or lies is kDataLoss, and the error names the table, the record and the field; a
// format version of the future is kUnimplemented. All functions may be called from any thread.
#ifndef LAMINA_CHUNKSTORE_BLOB_TABLES_H_
#define LAMINA_CHUNKSTORE_BLOB_TABLES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"
#include "chunkstore/format.h"

namespace lamina::chunkstore {

// What the image manifest says of a layer blob: the root of trust for all of it.
struct LayerDescriptor {
  Digest digest;
  uint64_t size = 0;
  uint64_t section_table_offset = 0;
  Digest section_table_digest;
  bool operator==(const LayerDescriptor&) const = default;
  // Names the blob on a node: of `digest` and `section_table_digest` together. Two manifests may name
  // one object and disagree on what is in it; whoever lies must not stand in the other's way.
  Digest Key() const;
};

// One part of the object, readable with one range request.
struct Section {
  uint64_t offset = 0;
  uint64_t length = 0;               // bytes in the object
  uint64_t uncompressed_length = 0;  // == length if it is stored as it is
  bool compressed = false;           // one zstd frame
  Digest digest;                     // of the bytes in the object
};

struct SectionTable {
  uint32_t blocks = 0;         // length of the address space
  uint64_t frames_length = 0;  // the frames fill the object from 0 to here
  Section chunk_table;
  Section metadata;  // EROFS
  Section frame_table;

  // `bytes` is the end of the object from descriptor.section_table_offset on. Checks its digest,
  // then that the sections fill the object behind the frames without gap or overlap and have
  // lengths that fit each other and the limits in format.h: memory may be allocated by them.
  static absl::StatusOr<SectionTable> Parse(std::span<const std::byte> bytes,
                                            const LayerDescriptor& descriptor);
};

// Checks the digest of a section's bytes and decompresses it if it is compressed; `name` is for
// errors. Holds section.uncompressed_length bytes besides `bytes`.
absl::StatusOr<std::string> DecodeSection(const Section& section, std::string_view name,
                                          std::span<const std::byte> bytes);

// The same for a section that may be large: its content goes to `sink` piece by piece, and no more than
// a window of it is in memory.
absl::Status DecodeSectionTo(const Section& section, std::string_view name,
                             std::span<const std::byte> bytes,
                             const std::function<absl::Status(std::span<const std::byte>)>& sink);

// SHA-256 over the digests of the chunks in a decoded chunk table: names what a blob holds, whatever
// its frames are. The tag of the device in the blob's metadata is its hex digits.
Digest ContentDigest(std::span<const std::byte> chunk_table);

// Block -> frame. A view: borrows the decoded bytes of the section, which must be aligned to 8
// bytes (a std::string's or a mapping's are; kInvalidArgument otherwise), outlive it and not
// change. Immutable, any number of threads.
class FrameTable {
 public:
  FrameTable() = default;
  // Checks that the frames tile the address space and the object's frame area without gap or
  // overlap and stay within the limits of format.h.
  static absl::StatusOr<FrameTable> Parse(std::span<const std::byte> bytes,
                                          const SectionTable& sections);

  uint32_t size() const { return static_cast<uint32_t>(frames_.size()); }
  const FrameRecord& operator[](uint32_t index) const { return frames_[index]; }
  // The frame that holds `block`, which must be inside the address space. Takes the same time in a
  // table of any size.
  uint32_t Find(uint32_t block) const;

 private:
  std::span<const FrameRecord> frames_;
  // Frames that hold blocks 0, kBlocksPerFrame, 2 * kBlocksPerFrame ...: at most one for each
  // frame.
  std::vector<uint32_t> starts_;
};

// The chunks in the order of their blocks. A view, as above.
class ChunkTable {
 public:
  ChunkTable() = default;
  // Checks that chunks tile the address space and that a frame holds whole chunks or a chunk whole
  // frames. `frames` was parsed with the same `sections`.
  static absl::StatusOr<ChunkTable> Parse(std::span<const std::byte> bytes,
                                          const SectionTable& sections, const FrameTable& frames);

  uint32_t size() const { return static_cast<uint32_t>(chunks_.size()); }
  const ChunkRecord& operator[](uint32_t index) const { return chunks_[index]; }
  // The chunk that holds `block`.
  uint32_t Find(uint32_t block) const;

 private:
  std::span<const ChunkRecord> chunks_;
};

// Checks a frame's compressed bytes against its digest, then decompresses them into `into`, which
// is exactly frame.blocks * kBlockSize long. Nothing unverified reaches the decompressor. After an
// error the content of `into` is undefined. Errors do not name the frame: the caller knows its
// index.
absl::Status DecodeFrame(const FrameRecord& frame, std::span<const std::byte> compressed,
                         std::span<std::byte> into);

// XXH3-64 of a frame's uncompressed bytes against the record: for data re-read from the local disk.
bool FrameIsIntact(const FrameRecord& frame, std::span<const std::byte> uncompressed);

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_BLOB_TABLES_H_
