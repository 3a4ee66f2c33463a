// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/node_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "chunkstore/base/file.h"

namespace lamina::chunkstore {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::SizeIs;

Digest Named(std::string_view name) { return Digest::Of(AsBytes(name)); }

// A chunk table of chunks of one block each, named by numbers.
class Chunks {
 public:
  Chunks(int first, int count) {
    for (int i = 0; i < count; ++i) {
      ChunkRecord record{.first_block = static_cast<uint32_t>(i), .length = 100};
      std::ranges::copy(Digest::Of(AsBytes(std::to_string(first + i))).bytes, record.digest);
      records_.push_back(record);
      frame_records_.push_back({.offset = static_cast<uint64_t>(i),
                                .length = 1,
                                .first_block = static_cast<uint32_t>(i),
                                .blocks = 1});
    }
    SectionTable sections{.blocks = static_cast<uint32_t>(count),
                          .frames_length = static_cast<uint64_t>(count)};
    const auto chunk_bytes = std::as_bytes(std::span(records_));
    const auto frame_bytes = std::as_bytes(std::span(frame_records_));
    sections.chunk_table.length = sections.chunk_table.uncompressed_length = chunk_bytes.size();
    sections.frame_table.length = sections.frame_table.uncompressed_length = frame_bytes.size();
    frames_ = FrameTable::Parse(frame_bytes, sections).value();
    table_ = ChunkTable::Parse(chunk_bytes, sections, frames_).value();
  }

  const ChunkTable& table() const { return table_; }

 private:
  std::vector<ChunkRecord> records_;
  std::vector<FrameRecord> frame_records_;
  FrameTable frames_;
  ChunkTable table_;
};

class NodeIndexTest : public testing::Test {
 protected:
  NodeIndexTest() : root_(TemporaryDirectory::Create(testing::TempDir(), "lamina-index-").value()) {
    index_ = NodeIndex::Open(path()).value();
  }

  std::string path() const { return root_.path() + "/index"; }
  void Reopen() {
    index_.reset();
    index_ = NodeIndex::Open(path()).value();
  }

  TemporaryDirectory root_;
  std::unique_ptr<NodeIndex> index_;
};

TEST_F(NodeIndexTest, FindsChunksInOtherBlobs) {
  ASSERT_TRUE(index_->AddBlob(Named("a"), Chunks(0, 10).table()).ok());
  ASSERT_TRUE(index_->AddBlob(Named("b"), Chunks(5, 10).table()).ok());
  const auto both = index_->FindChunk(Named("7"), Named("c"));
  ASSERT_TRUE(both.ok());
  EXPECT_THAT(*both, SizeIs(2));
  const auto other = index_->FindChunk(Named("7"), Named("a"));
  ASSERT_THAT(other.value(), SizeIs(1));
  EXPECT_EQ(other->front().blob, Named("b"));
  EXPECT_EQ(other->front().first_block, 2u);
  EXPECT_EQ(other->front().length, 100u);
  EXPECT_THAT(index_->FindChunk(Named("2"), Named("a")).value(), IsEmpty());
  EXPECT_THAT(index_->FindChunk(Named("99"), Named("a")).value(), IsEmpty());
}

TEST_F(NodeIndexTest, GivesAHandfulOfPlacesAtMost) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(index_->AddBlob(Named(std::to_string(i)), Chunks(0, 1).table()).ok());
  }
  EXPECT_THAT(index_->FindChunk(Named("0"), Named("x")).value(), SizeIs(4));
}

TEST_F(NodeIndexTest, KnowsWhichBlobsAreThere) {
  EXPECT_FALSE(index_->HasBlob(Named("a")).value());
  ASSERT_TRUE(index_->AddBlob(Named("a"), Chunks(0, 3).table()).ok());
  EXPECT_TRUE(index_->HasBlob(Named("a")).value());
  ASSERT_TRUE(index_->AddBlob(Named("a"), Chunks(0, 3).table()).ok());
  ASSERT_TRUE(index_->RemoveBlob(Named("a"), Chunks(0, 3).table()).ok());
  EXPECT_FALSE(index_->HasBlob(Named("a")).value());
  EXPECT_THAT(index_->FindChunk(Named("1"), Named("x")).value(), IsEmpty());
}

TEST_F(NodeIndexTest, RemovingABlobLeavesOthersTheirChunks) {
  ASSERT_TRUE(index_->AddBlob(Named("a"), Chunks(0, 3).table()).ok());
  ASSERT_TRUE(index_->AddBlob(Named("b"), Chunks(0, 3).table()).ok());
  ASSERT_TRUE(index_->RemoveBlob(Named("a"), Chunks(0, 3).table()).ok());
  EXPECT_THAT(index_->FindChunk(Named("1"), Named("x")).value(), SizeIs(1));
}

TEST_F(NodeIndexTest, HoldsALargeBlobAcrossARestart) {
  const Chunks chunks(0, 100'000);
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(index_->AddBlob(Named("large"), chunks.table()).ok());
  RecordProperty("add_100k_chunks_ms", static_cast<int>((std::chrono::steady_clock::now() - start) /
                                                        std::chrono::milliseconds(1)));
  Reopen();
  EXPECT_TRUE(index_->HasBlob(Named("large")).value());
  for (int i = 0; i < 100'000; i += 997) {
    const auto found = index_->FindChunk(Named(std::to_string(i)), Named("x"));
    ASSERT_THAT(found.value(), SizeIs(1)) << i;
    EXPECT_EQ(found->front().first_block, static_cast<uint32_t>(i));
  }
}

TEST_F(NodeIndexTest, KeepsMountRecords) {
  ASSERT_TRUE(index_->PutMount("m1", "one").ok());
  ASSERT_TRUE(index_->PutMount("m2", std::string("t\0wo", 4)).ok());
  ASSERT_TRUE(index_->PutMount("m1", "one again").ok());
  Reopen();
  EXPECT_THAT(index_->Mounts().value(),
              ElementsAre(Pair("m1", "one again"), Pair("m2", std::string("t\0wo", 4))));
  ASSERT_TRUE(index_->RemoveMount("m1").ok());
  ASSERT_TRUE(index_->RemoveMount("never there").ok());
  EXPECT_THAT(index_->Mounts().value(), SizeIs(1));
}

TEST_F(NodeIndexTest, SecondUserIsRefusedByName) {
  const auto second = NodeIndex::Open(path());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(path()));
}

TEST_F(NodeIndexTest, DamageIsReportedWithTheWayOut) {
  ASSERT_TRUE(index_->AddBlob(Named("a"), Chunks(0, 1000).table()).ok());
  index_.reset();
  for (const auto& entry : std::filesystem::directory_iterator(path())) {
    if (entry.path().filename().string().starts_with("MANIFEST")) {
      std::ofstream(entry.path(), std::ios::binary) << std::string(500, 'x');
    }
  }
  const auto damaged = NodeIndex::Open(path());
  EXPECT_EQ(damaged.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(damaged.status().message()), HasSubstr("remove " + path()));
  std::filesystem::remove_all(path());
  Reopen();
  EXPECT_TRUE(index_->Mounts().value().empty());
}

TEST_F(NodeIndexTest, MissingAndMisplacedFilesAreReportedWithTheWayOut) {
  index_.reset();
  for (const auto& entry : std::filesystem::directory_iterator(path())) {
    if (entry.path().filename().string().starts_with("MANIFEST")) {
      std::filesystem::remove(entry.path());
    }
  }
  const auto missing = NodeIndex::Open(path());
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kDataLoss) << missing.status();
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("remove " + path()));
  std::filesystem::remove(path() + "/CURRENT");
  std::filesystem::create_directory(path() + "/CURRENT");
  const auto misplaced = NodeIndex::Open(path());
  EXPECT_EQ(misplaced.status().code(), absl::StatusCode::kDataLoss) << misplaced.status();
  EXPECT_THAT(std::string(misplaced.status().message()), HasSubstr("remove " + path()));
  std::filesystem::remove_all(path());
  Reopen();
}

TEST_F(NodeIndexTest, ManyThreadsUseItAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const std::string name = std::to_string(i);
      EXPECT_TRUE(index_->AddBlob(Named("blob" + name), Chunks(i * 1000, 2000).table()).ok());
      EXPECT_TRUE(index_->PutMount(name, name).ok());
      EXPECT_FALSE(index_->FindChunk(Named(std::to_string(i * 1000)), Named("x"))->empty());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(index_->Mounts().value(), SizeIs(4));
}

}  // namespace
}  // namespace lamina::chunkstore
