// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/blob_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/chunkstore/blob_testing.h"

namespace lamina::chunkstore {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kKiB = 1024;

// Seven frames and five chunks: chunks of 1 and 2 blocks in frame 0; 300 KiB in frames 1 and 2;
// 600 KiB in frames 3 to 5; 3 blocks in frame 6.
const TestBlob& SmallBlob() {
  static const TestBlob blob =
      BuildBlob({RandomBytes(100, 1), RandomBytes(8000, 2), RandomBytes(300 * kKiB, 3),
                 RandomBytes(600 * kKiB, 4), TextBytes(12 * kKiB, 5)});
  return blob;
}

std::string Compress(std::string_view data) {
  std::string frame(ZSTD_compressBound(data.size()), '\0');
  frame.resize(ZSTD_compress(frame.data(), frame.size(), data.data(), data.size(), 3));
  return frame;
}

// The status of opening a blob whose parts and section table were changed, with digests that match
// the changed bytes: what a hostile image looks like.
absl::Status OpenChanged(const std::function<void(BlobParts&)>& change_parts,
                         const std::function<void(SectionTableRecord&)>& change_table = {}) {
  BlobParts parts = BlobParts::Of(SmallBlob());
  if (change_parts) change_parts(parts);
  SectionTableRecord table = parts.MakeTable();
  if (change_table) change_table(table);
  LayerDescriptor descriptor;
  const std::string object = parts.Assemble(table, &descriptor);
  OpenBlob blob;
  return blob.Open(object, descriptor);
}

TEST(BlobTables, UnchangedPartsOpen) { EXPECT_EQ(OpenChanged({}), absl::OkStatus()); }

struct TableLie {
  std::string name;
  std::function<void(SectionTableRecord&)> change;
  std::string error;
};
void PrintTo(const TableLie& lie, std::ostream* out) { *out << lie.name; }

class SectionTableLies : public testing::TestWithParam<TableLie> {};

TEST_P(SectionTableLies, AreRefusedByName) {
  const absl::Status status = OpenChanged({}, GetParam().change);
  EXPECT_EQ(std::string(status.message()), "section table: " + GetParam().error);
  EXPECT_EQ(status.code(), GetParam().name == "Version" ? absl::StatusCode::kUnimplemented
                                                        : absl::StatusCode::kDataLoss);
}

std::vector<TableLie> AllTableLies() {
  using Table = SectionTableRecord;
  const Table good = BlobParts::Of(SmallBlob()).MakeTable();
  const uint64_t chunks = good.chunk_table.offset;
  const uint64_t metadata = good.metadata.offset;
  const uint64_t frames = good.frame_table.offset;
  const uint64_t end = frames + good.frame_table.length;
  const uint64_t stored = good.metadata.length;
  return {
      {"Magic", [](Table& t) { t.magic[3] ^= 1; }, "wrong magic number"},
      {"Version", [](Table& t) { t.version = 2; }, "format version 2, only 1 is known"},
      {"Reserved", [](Table& t) { t.reserved = 7; }, "reserved field is 7, not 0"},
      {"FewerBlocks", [](Table& t) { t.blocks = 4; },
       "chunk table: 5 records cannot cover 4 blocks"},
      {"MoreBlocks", [](Table& t) { t.blocks = 5 * 256 + 1; },
       "chunk table: 5 records cannot cover 1281 blocks"},
      {"BlocksForMoreFrames", [](Table& t) { t.blocks = 7 * 64 + 1; },
       "frame table: 7 records cannot cover 449 blocks"},
      {"FramesLengthPastTheEnd", [=](Table& t) { t.frames_length = end + 1; },
       fmt::format("frames length {} reaches past the section table at {}", end + 1, end)},
      {"FramesLengthShort", [](Table& t) { --t.frames_length; },
       fmt::format("chunk table: offset is {}, but what comes before it ends at {}", chunks,
                   chunks - 1)},
      {"ChunkTableOffset", [](Table& t) { ++t.chunk_table.offset; },
       fmt::format("chunk table: offset is {}, but what comes before it ends at {}", chunks + 1,
                   chunks)},
      {"ChunkTableLengthOverflow", [](Table& t) { t.chunk_table.length = UINT64_MAX; },
       fmt::format("chunk table: length {} reaches past the section table at {}", UINT64_MAX, end)},
      {"ChunkTableShort", [](Table& t) { t.chunk_table.length -= 40; },
       "chunk table: uncompressed length is 200, but 160 bytes are stored as they are"},
      {"ChunkTableCompressed", [](Table& t) { t.chunk_table.flags = kSectionCompressed; },
       "chunk table: is compressed, which tables must not be"},
      {"ChunkTableFlags", [](Table& t) { t.chunk_table.flags = 6; },
       "chunk table: flags 0x6 are not known"},
      {"ChunkTableReserved", [](Table& t) { t.chunk_table.reserved = 1; },
       "chunk table: reserved field is 1, not 0"},
      {"MetadataOffset", [](Table& t) { t.metadata.offset = 0; },
       fmt::format("metadata: offset is 0, but what comes before it ends at {}", metadata)},
      {"MetadataLength", [=](Table& t) { t.metadata.length = end - metadata + 1; },
       fmt::format("metadata: length {} reaches past the section table at {}", end - metadata + 1,
                   end)},
      {"MetadataLengthStored", [](Table& t) { t.metadata.uncompressed_length = 9; },
       fmt::format("metadata: uncompressed length is 9, but {} bytes are stored as they are",
                   stored)},
      {"MetadataTooLarge",
       [](Table& t) {
         t.metadata.flags = kSectionCompressed;
         t.metadata.uncompressed_length = kMaxMetadataSize + 1;
       },
       "metadata: uncompressed length is 4294967297, more than the 4294967296 allowed"},
      {"MetadataBomb",
       [](Table& t) {
         t.metadata.flags = kSectionCompressed;
         t.metadata.uncompressed_length = kMaxMetadataSize;
       },
       fmt::format("metadata: uncompressed length is 4294967296, more than 64 times the {} bytes "
                   "stored",
                   stored)},
      {"MetadataSmallerBomb",
       [](Table& t) {
         t.metadata.flags = kSectionCompressed;
         t.metadata.uncompressed_length = kLargeMetadataSize;
       },
       fmt::format("metadata: uncompressed length is 268435456, more than 256 times the {} bytes "
                   "stored",
                   stored)},
      {"MetadataFlags", [](Table& t) { t.metadata.flags = 2; },
       "metadata: flags 0x2 are not known"},
      {"MetadataReserved", [](Table& t) { t.metadata.reserved = 1; },
       "metadata: reserved field is 1, not 0"},
      {"FrameTableOffset", [](Table& t) { t.frame_table.offset = UINT64_MAX; },
       fmt::format("frame table: offset is {}, but what comes before it ends at {}", UINT64_MAX,
                   frames)},
      {"FrameTableShort",
       [](Table& t) {
         t.frame_table.length -= 64;
         t.frame_table.uncompressed_length -= 64;
       },
       fmt::format("sections end at {}, but it begins at {}", end - 64, end)},
      {"FrameTableLong", [](Table& t) { ++t.frame_table.length; },
       fmt::format("frame table: length 449 reaches past the section table at {}", end)},
      {"FrameTableCompressed", [](Table& t) { t.frame_table.flags = kSectionCompressed; },
       "frame table: is compressed, which tables must not be"},
      {"FrameTableReserved", [](Table& t) { t.frame_table.reserved = 1u << 31; },
       "frame table: reserved field is 2147483648, not 0"},
  };
}

INSTANTIATE_TEST_SUITE_P(OfEveryField, SectionTableLies, testing::ValuesIn(AllTableLies()),
                         [](const auto& info) { return info.param.name; });

TEST(SectionTable, LengthsThatAreNoWholeRecordsAreRefused) {
  EXPECT_EQ(OpenChanged({},
                        [](SectionTableRecord& table) {
                          // One byte moves from the metadata to the chunk table.
                          ++table.chunk_table.length;
                          ++table.chunk_table.uncompressed_length;
                          ++table.metadata.offset;
                          --table.metadata.length;
                          --table.metadata.uncompressed_length;
                        }),
            absl::DataLossError("section table: chunk table: length 201 is not a multiple of 40"));
}

TEST(SectionTable, SectionDigestsAreChecked) {
  using Table = SectionTableRecord;
  const std::vector<std::pair<std::string, std::function<void(Table&)>>> changes = {
      {"frame table", [](Table& t) { t.frame_table.digest[0] ^= 1; }},
      {"chunk table", [](Table& t) { t.chunk_table.digest[31] ^= 128; }},
      {"metadata", [](Table& t) { t.metadata.digest[7] ^= 1; }}};
  for (const auto& [name, change] : changes) {
    const absl::Status status = OpenChanged({}, change);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr(name + ": digest is sha256:"));
  }
}

TEST(SectionTable, DescriptorThatDoesNotFitIsRefused) {
  const TestBlob& blob = SmallBlob();
  const auto parse = [&](const LayerDescriptor& descriptor, size_t length) {
    return SectionTable::Parse(AsBytes(blob.object.substr(blob.info.section_table_offset, length)),
                               descriptor)
        .status();
  };
  const LayerDescriptor good = blob.descriptor();
  ASSERT_EQ(parse(good, 224), absl::OkStatus());
  EXPECT_EQ(parse(good, 223), absl::DataLossError("section table: 223 bytes, not 224"));

  LayerDescriptor bad = good;
  ++bad.size;
  EXPECT_EQ(parse(bad, 224),
            absl::DataLossError(fmt::format("section table: descriptor has it at {} of {} bytes, "
                                            "not 224 bytes before the end",
                                            bad.section_table_offset, bad.size)));
  bad = good;
  bad.size = 223;
  EXPECT_EQ(parse(bad, 224).code(), absl::StatusCode::kDataLoss);
  bad = good;
  bad.section_table_offset = UINT64_MAX;
  EXPECT_EQ(parse(bad, 224).code(), absl::StatusCode::kDataLoss);
  bad = good;
  bad.section_table_digest = Digest();
  EXPECT_THAT(std::string(parse(bad, 224).message()),
              HasSubstr("section table: digest is sha256:"));
}

// The section table alone of a blob with so many frames and chunks, one block each.
absl::Status ParseTableOfSize(uint32_t blocks, uint64_t frames) {
  SectionTableRecord table{
      .magic = kMagic, .version = kVersion, .blocks = blocks, .frames_length = frames};
  uint64_t position = table.frames_length;
  const auto place = [&](uint64_t length) {
    return SectionRecord{.offset = std::exchange(position, position + length),
                         .length = length,
                         .uncompressed_length = length};
  };
  table.chunk_table = place(blocks * uint64_t{sizeof(ChunkRecord)});
  table.metadata = place(0);
  table.frame_table = place(frames * sizeof(FrameRecord));
  const auto bytes = std::as_bytes(std::span(&table, 1));
  return SectionTable::Parse(bytes, {.size = position + sizeof(table),
                                     .section_table_offset = position,
                                     .section_table_digest = Digest::Of(bytes)})
      .status();
}

TEST(SectionTable, BlobsAsLargeAsTheFormatAllowsAreAccepted) {
  EXPECT_EQ(ParseTableOfSize(kMaxBlocks, kMaxFrames), absl::OkStatus());
  EXPECT_EQ(ParseTableOfSize(kMaxBlocks, kMaxFrames + 1),
            absl::DataLossError("section table: frame table: more than 268435456 records"));
}

struct RecordLie {
  std::string name;
  std::function<void(BlobParts&)> change;
  std::string error;
};
void PrintTo(const RecordLie& lie, std::ostream* out) { *out << lie.name; }

class RecordLies : public testing::TestWithParam<RecordLie> {};

TEST_P(RecordLies, AreRefusedByNameAndIndex) {
  EXPECT_EQ(OpenChanged(GetParam().change), absl::DataLossError(GetParam().error));
}

std::vector<RecordLie> AllRecordLies() {
  using Parts = BlobParts;
  const Parts good = Parts::Of(SmallBlob());
  const uint64_t end_of_0 = good.frames[1].offset;
  const uint64_t end = good.frame_data.size();
  return {
      {"FrameOffset", [](Parts& p) { ++p.frames[1].offset; },
       fmt::format("frame 1: offset is {}, but the frame before it ends at {}", end_of_0 + 1,
                   end_of_0)},
      {"FrameOffsetOfFirst", [](Parts& p) { p.frames[0].offset = 1; },
       "frame 0: offset is 1, but the frame before it ends at 0"},
      {"FrameLengthZero", [](Parts& p) { p.frames[2].length = 0; },
       "frame 2: length is 0, not 1 to 263168"},
      {"FrameLengthTooLarge", [](Parts& p) { p.frames[2].length = kMaxFrameLength + 1; },
       "frame 2: length is 263169, not 1 to 263168"},
      {"FrameLengthPastTheEnd", [](Parts& p) { ++p.frames[6].length; },
       fmt::format("frame 6: length {} reaches past the end of the frames at {}",
                   good.frames[6].length + 1, end)},
      {"FrameLengthShort", [](Parts& p) { --p.frames[6].length; },
       fmt::format("frame table: frames end at {}, the section table says {}", end - 1, end)},
      {"FrameFirstBlock", [](Parts& p) { p.frames[1].first_block = 2; },
       "frame 1: first block is 2, but the frame before it ends at 3"},
      {"FrameWithoutBlocks", [](Parts& p) { p.frames[0].blocks = 0; },
       "frame 0: has 0 blocks, not 1 to 64"},
      {"FrameWithManyBlocks", [](Parts& p) { p.frames[1].blocks = 65; },
       "frame 1: has 65 blocks, not 1 to 64"},
      {"FrameWithHugeBlocks", [](Parts& p) { p.frames[1].blocks = UINT32_MAX; },
       "frame 1: has 4294967295 blocks, not 1 to 64"},
      {"FrameBlocksPastTheEnd", [](Parts& p) { p.frames[6].blocks = 4; },
       "frame 6: its 4 blocks reach past the end of the address space at 231"},
      {"FrameBlocksShort", [](Parts& p) { p.frames[6].blocks = 2; },
       "frame table: frames cover 230 blocks, the address space has 231"},
      {"FrameReserved", [](Parts& p) { p.frames[3].reserved = 9; },
       "frame 3: reserved field is 9, not 0"},
      {"FrameChecksum", [](Parts& p) { p.frames[4].checksum ^= 1; }, "frame 4: wrong checksum"},
      {"FrameContentIsShorter",
       [](Parts& p) {
         // A block moves from frame 5 to frame 6, and from chunk 3 to chunk 4.
         p.frames[5].blocks = 21;
         p.frames[6].first_block -= 1;
         p.frames[6].blocks = 4;
         p.chunks[3].length -= kBlockSize;
         p.chunks[4].first_block -= 1;
         p.chunks[4].length += kBlockSize;
       },
       "frame 5: zstd frame holds 90112 bytes, expected 86016"},
      {"ChunkFirstBlock", [](Parts& p) { p.chunks[1].first_block = 0; },
       "chunk 1: first block is 0, but the chunk before it ends at 1"},
      {"ChunkLengthZero", [](Parts& p) { p.chunks[4].length = 0; },
       "chunk 4: length is 0, not 1 to 1048576"},
      {"ChunkLengthTooLarge", [](Parts& p) { p.chunks[4].length = kChunkSize + 1; },
       "chunk 4: length is 1048577, not 1 to 1048576"},
      {"ChunkLengthPastTheEnd", [](Parts& p) { p.chunks[4].length = 3 * kBlockSize + 1; },
       "chunk 4: length 12289 reaches past the end of the address space at block 231"},
      {"ChunkLengthShort", [](Parts& p) { p.chunks[4].length = 2 * kBlockSize; },
       "chunk table: chunks cover 230 blocks, the address space has 231"},
      {"ChunkDigest", [](Parts& p) { p.chunks[2].digest[0] ^= 1; }, "chunk 2: wrong digest"},
      {"ChunkLengthInsideTheBlock", [](Parts& p) { ++p.chunks[0].length; },
       "chunk 0: wrong digest"},
      {"ChunkBeginsInAFrameAndLeavesIt",
       [](Parts& p) {
         p.chunks[1].length = 75 * kBlockSize;
         p.chunks[2].first_block = 76;
         p.chunks[2].length = 2 * kBlockSize;
       },
       "chunk 1: blocks 1 to 75 are neither inside one frame nor a number of whole frames"},
      {"ChunkOfFramesEndsInsideOne",
       [](Parts& p) {
         p.chunks[2].length -= kBlockSize;
         p.chunks[3].first_block -= 1;
         p.chunks[3].length += kBlockSize;
       },
       "chunk 2: blocks 3 to 76 are neither inside one frame nor a number of whole frames"},
  };
}

INSTANTIATE_TEST_SUITE_P(OfEveryField, RecordLies, testing::ValuesIn(AllRecordLies()),
                         [](const auto& info) { return info.param.name; });

// Every byte of a blob is covered by some digest, and every digest by the descriptor.
TEST(BlobTables, EveryFlippedBitIsFound) {
  const TestBlob blob =
      BuildBlob(std::vector<FileParts>{{{.data = TextBytes(700, 1)}}, {{.data = "a"}}}, "tiny");
  ASSERT_LT(blob.object.size(), 2000);
  for (size_t bit = 0; bit < blob.object.size() * 8; ++bit) {
    std::string object = blob.object;
    object[bit / 8] ^= static_cast<char>(1 << bit % 8);
    OpenBlob open;
    ASSERT_EQ(open.Open(object, blob.descriptor()).code(), absl::StatusCode::kDataLoss)
        << "bit " << bit;
  }
}

TEST(FrameTable, FindsTheFrameOfEveryBlock) {
  OpenBlob blob;
  const TestBlob& built = SmallBlob();
  ASSERT_EQ(blob.Open(built.object, built.descriptor()), absl::OkStatus());
  uint32_t block = 0;
  for (uint32_t i = 0; i < blob.frames.size(); ++i) {
    for (uint32_t n = 0; n < blob.frames[i].blocks; ++n) EXPECT_EQ(blob.frames.Find(block++), i);
  }
  EXPECT_EQ(block, 231);
}

TEST(ChunkTable, FindsTheChunkOfEveryBlock) {
  OpenBlob blob;
  const TestBlob& built = SmallBlob();
  ASSERT_EQ(blob.Open(built.object, built.descriptor()), absl::OkStatus());
  for (uint32_t i = 0; i < blob.chunks.size(); ++i) {
    const uint32_t end = i + 1 < blob.chunks.size() ? blob.chunks[i + 1].first_block : 231;
    for (uint32_t b = blob.chunks[i].first_block; b < end; ++b) EXPECT_EQ(blob.chunks.Find(b), i);
  }
}

TEST(FrameTable, BytesOfAnotherLengthOrAlignmentAreRefused) {
  OpenBlob blob;
  const TestBlob& built = SmallBlob();
  ASSERT_EQ(blob.Open(built.object, built.descriptor()), absl::OkStatus());
  EXPECT_EQ(FrameTable::Parse(AsBytes(blob.frame_bytes).first(64), blob.sections).status(),
            absl::DataLossError("frame table: 64 bytes, but the section table says 448"));
  const std::string moved = "x" + blob.frame_bytes;
  EXPECT_EQ(FrameTable::Parse(AsBytes(moved).subspan(1), blob.sections).status(),
            absl::InvalidArgumentError("frame table: bytes are not aligned to 8 in memory"));
  EXPECT_EQ(
      ChunkTable::Parse(AsBytes(blob.chunk_bytes).first(40), blob.sections, blob.frames).status(),
      absl::DataLossError("chunk table: 40 bytes, but the section table says 200"));
}

// Sections as DecodeSection gets them.
Section SectionOf(std::string_view bytes, uint64_t uncompressed_length) {
  return {.length = bytes.size(),
          .uncompressed_length = uncompressed_length,
          .compressed = true,
          .digest = Digest::Of(AsBytes(bytes))};
}

absl::Status DecodeStatus(std::string_view bytes, uint64_t uncompressed_length) {
  return DecodeSection(SectionOf(bytes, uncompressed_length), "metadata", AsBytes(bytes)).status();
}

TEST(DecodeSection, GivesTheContent) {
  const std::string content = TextBytes(1 << 20, 1);
  const std::string bytes = Compress(content);
  const auto decoded = DecodeSection(SectionOf(bytes, content.size()), "metadata", AsBytes(bytes));
  ASSERT_EQ(decoded.status(), absl::OkStatus());
  EXPECT_TRUE(*decoded == content);
}

TEST(DecodeSection, BytesOfAnotherLengthAreRefused) {
  const std::string bytes = Compress("content");
  EXPECT_EQ(DecodeSection(SectionOf(bytes, 7), "metadata", AsBytes(bytes).first(5)).status(),
            absl::DataLossError(
                fmt::format("metadata: 5 bytes, but the section table says {}", bytes.size())));
}

TEST(DecodeSection, ContentOfAnotherLengthIsRefusedBeforeItIsAllocated) {
  EXPECT_EQ(DecodeStatus(Compress("content"), uint64_t{1} << 50),
            absl::DataLossError("metadata: zstd frame holds 7 bytes, expected 1125899906842624"));
}

TEST(DecodeSection, WindowThatIsTooLargeIsRefused) {
  std::string bytes = Compress(TextBytes(10 << 20, 1));
  ASSERT_EQ(bytes[4] & 0x20, 0) << "a frame of this size has a window";
  bytes[5] = 14 << 3;  // 2^(10 + 14)
  EXPECT_EQ(DecodeStatus(bytes, 10 << 20),
            absl::DataLossError("metadata: zstd frame needs a window of 16777216 bytes, more than "
                                "the 8388608 allowed"));
}

// A frame with this content and these compressed bytes, whatever they are.
FrameRecord RecordOf(std::string_view compressed, uint32_t blocks) {
  FrameRecord record{.length = static_cast<uint32_t>(compressed.size()), .blocks = blocks};
  std::ranges::copy(Digest::Of(AsBytes(compressed)).bytes, record.digest);
  return record;
}

absl::Status DecodeFrameStatus(std::string_view compressed, uint32_t blocks) {
  std::string into(uint64_t{blocks} * kBlockSize, '\0');
  return DecodeFrame(RecordOf(compressed, blocks), AsBytes(compressed),
                     std::as_writable_bytes(std::span(into)));
}

TEST(DecodeFrame, WrongDigestIsRefused) {
  const std::string compressed = Compress(TextBytes(kBlockSize, 1));
  FrameRecord record = RecordOf(compressed, 1);
  record.digest[5] ^= 1;
  std::string into(kBlockSize, 'x');
  const absl::Status status =
      DecodeFrame(record, AsBytes(compressed), std::as_writable_bytes(std::span(into)));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("digest is sha256:"));
  EXPECT_EQ(into, std::string(kBlockSize, 'x')) << "nothing may be decompressed";
}

TEST(DecodeFrame, SpansOfAnotherLengthAreRefused) {
  const std::string compressed = Compress(TextBytes(kBlockSize, 1));
  const FrameRecord record = RecordOf(compressed, 1);
  std::string into(2 * kBlockSize, '\0');
  const auto room = std::as_writable_bytes(std::span(into));
  EXPECT_EQ(DecodeFrame(record, AsBytes(compressed), room).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodeFrame(record, AsBytes(compressed).subspan(1), room.first(kBlockSize)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(DecodeFrame, ContentOfAnotherLengthIsRefused) {
  EXPECT_EQ(DecodeFrameStatus(Compress(TextBytes(kBlockSize + 1, 1)), 1),
            absl::DataLossError("zstd frame holds 4097 bytes, expected 4096"));
  EXPECT_EQ(DecodeFrameStatus(Compress(TextBytes(kBlockSize - 1, 1)), 1),
            absl::DataLossError("zstd frame holds 4095 bytes, expected 4096"));
}

TEST(DecodeFrame, SecondFrameAndTrailingBytesAreRefused) {
  const std::string frame = Compress(TextBytes(kBlockSize, 1));
  EXPECT_EQ(DecodeFrameStatus(frame + "\n", 1),
            absl::DataLossError("zstd frame is followed by 1 further bytes"));
  const std::string half = Compress(TextBytes(kBlockSize, 2));
  EXPECT_EQ(DecodeFrameStatus(half + half, 2),
            absl::DataLossError("zstd frame holds 4096 bytes, expected 8192"));
}

TEST(DecodeFrame, TruncatedFrameIsRefused) {
  const std::string frame = Compress(TextBytes(kBlockSize, 1));
  for (size_t length = 0; length < frame.size(); ++length) {
    EXPECT_EQ(DecodeFrameStatus(frame.substr(0, length), 1).code(), absl::StatusCode::kDataLoss)
        << length;
  }
}

TEST(DecodeFrame, SkippableFrameIsRefused) {
  const std::string skippable("\x50\x2A\x4D\x18\x04\x00\x00\x00more", 12);
  EXPECT_EQ(DecodeFrameStatus(skippable, 1), absl::DataLossError("not a zstd frame"));
}

TEST(DecodeFrame, FrameThatDoesNotSayItsSizeIsRefused) {
  const std::string content = TextBytes(kBlockSize, 1);
  std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> context(ZSTD_createCCtx(), ZSTD_freeCCtx);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_contentSizeFlag, 0);
  std::string frame(ZSTD_compressBound(content.size()), '\0');
  frame.resize(
      ZSTD_compress2(context.get(), frame.data(), frame.size(), content.data(), content.size()));
  EXPECT_EQ(DecodeFrameStatus(frame, 1),
            absl::DataLossError("zstd frame does not say how long its content is"));
}

TEST(DecodeFrame, FrameWhoseBlocksAreDamagedIsRefused) {
  std::string frame = Compress(TextBytes(kBlockSize, 1));
  std::fill(frame.begin() + 20, frame.begin() + 60, '\xff');
  const absl::Status status = DecodeFrameStatus(frame, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("decompress: "));
}

TEST(FrameIsIntact, NoticesAnyChange) {
  const TestBlob& built = SmallBlob();
  OpenBlob blob;
  ASSERT_EQ(blob.Open(built.object, built.descriptor()), absl::OkStatus());
  std::string content = blob.address_space.substr(0, 3 * kBlockSize);
  EXPECT_TRUE(FrameIsIntact(blob.frames[0], AsBytes(content)));
  EXPECT_FALSE(FrameIsIntact(blob.frames[0], AsBytes(content).first(2 * kBlockSize)));
  EXPECT_FALSE(FrameIsIntact(blob.frames[1], AsBytes(content)));
  content[200] ^= 1;  // in the padding of the first chunk
  EXPECT_FALSE(FrameIsIntact(blob.frames[0], AsBytes(content)));
}

}  // namespace
}  // namespace lamina::chunkstore
