// SPDX-License-Identifier: Apache-2.0
//
// Copying chunks between the blobs of a node instead of fetching them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "chunkstore/blob_store.h"
#include "tests/chunkstore/store_testing.h"

namespace lamina::chunkstore {
namespace {

// Two layers with files in common, in a different order and packed into other frames.
class ChunkCopyTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    auto index = NodeIndex::Open(root() + "/index");
    ASSERT_TRUE(index.ok()) << index.status();
    index_ = std::move(*index);
    for (int i = 0; i < 30; ++i) small_.push_back(TextBytes(10'000 + i * 777, i));
    large_ = TextBytes((2 << 20) + 12'345, 99);
    first_ = AddFiles({small_, {large_}});
    second_ = AddFiles({{large_}, {small_.rbegin(), small_.rend()}});
  }

  TestBlob AddFiles(const std::vector<std::vector<std::string>>& lists) {
    std::vector<std::string> files;
    for (const auto& list : lists) files.insert(files.end(), list.begin(), list.end());
    return AddBlob(files);
  }

  std::shared_ptr<Blob> Attach(BlobStore& store, const TestBlob& blob,
                               std::shared_ptr<Origin> origin) {
    auto attached = StoreTest::Attach(store, blob.descriptor(), std::move(origin));
    attached->ShareChunks();
    while (!index_->HasBlob(blob.descriptor().Key()).value()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return attached;
  }

  std::shared_ptr<NodeIndex> index_;
  std::vector<std::string> small_;
  std::string large_;
  TestBlob first_;
  TestBlob second_;
};

TEST_F(ChunkCopyTest, FillsABlobFromAnotherWithoutItsOrigin) {
  const auto store = OpenStore(index_);
  const auto first = Attach(*store, first_, NewOrigin());
  ASSERT_TRUE(ReadBlob(*first).ok());
  const auto second = Attach(*store, second_, NewOrigin());
  std::filesystem::remove_all(layout());
  const auto stats = std::make_shared<ReadStats>();
  const auto content = ReadBlob(*second, 0, second->size(), stats);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_TRUE(*content == AddressSpace(second_));
  EXPECT_EQ(stats->copied_frames, second->frames().size());
  EXPECT_EQ(stats->fetched_frames, 0u);
  EXPECT_EQ(stats->origin_requests, 0u);
}

TEST_F(ChunkCopyTest, TheOriginGivesEveryByteOnce) {
  const auto store = OpenStore(index_);
  const auto origin = NewOrigin();
  const auto bytes_read = [&] {
    uint64_t bytes = 0;
    for (const auto& [offset, length] : origin->ranges()) bytes += length;
    origin->ForgetRanges();
    return bytes;
  };
  const auto first = Attach(*store, first_, origin);
  bytes_read();  // tables
  ASSERT_TRUE(ReadBlob(*first).ok());
  const FrameRecord& last = first->frames()[first->frames().size() - 1];
  EXPECT_EQ(bytes_read(), last.offset + last.length);
  const auto second = Attach(*store, second_, origin);
  bytes_read();
  EXPECT_TRUE(ReadBlob(*second).value() == AddressSpace(second_));
  EXPECT_EQ(bytes_read(), 0u);
}

TEST_F(ChunkCopyTest, CopiesWhatEvictionLeftAndFetchesTheRest) {
  const auto store = OpenStore(index_);
  const auto first = Attach(*store, first_, NewOrigin());
  const auto second = Attach(*store, second_, NewOrigin());
  ASSERT_TRUE(ReadBlob(*first).ok());
  // What was read last is let go of a moment after the read has returned.
  while (store->GetUsage().used_bytes > first->size() / 2) store->Shrink(first->size() / 2);
  const auto stats = std::make_shared<ReadStats>();
  EXPECT_TRUE(ReadBlob(*second, 0, second->size(), stats).value() == AddressSpace(second_));
  EXPECT_GT(stats->copied_frames, 0u);
  EXPECT_GT(stats->fetched_frames, 0u);
}

TEST_F(ChunkCopyTest, CopiesFromABlobThatIsNotAttached) {
  {
    const auto store = OpenStore(index_);
    ASSERT_TRUE(ReadBlob(*Attach(*store, first_, NewOrigin())).ok());
  }
  const auto store = OpenStore(index_);
  const auto second = Attach(*store, second_, NewOrigin());
  const auto stats = std::make_shared<ReadStats>();
  EXPECT_EQ(ReadBlob(*second, 0, second->size(), stats).value(), AddressSpace(second_));
  EXPECT_EQ(stats->copied_frames, second->frames().size());
}

TEST_F(ChunkCopyTest, FetchesWhatTheOtherBlobDoesNotHaveYet) {
  const auto store = OpenStore(index_);
  const auto first = Attach(*store, first_, NewOrigin());
  ASSERT_TRUE(ReadBlob(*first, 0, 1).ok());
  const auto second = Attach(*store, second_, NewOrigin());
  const auto stats = std::make_shared<ReadStats>();
  EXPECT_EQ(ReadBlob(*second, 0, second->size(), stats).value(), AddressSpace(second_));
  EXPECT_GT(stats->fetched_frames, 0u);
}

TEST_F(ChunkCopyTest, DamagedSourceIsNotCopied) {
  {
    const auto store = OpenStore(index_);
    ASSERT_TRUE(ReadBlob(*Attach(*store, first_, NewOrigin())).ok());
  }
  {
    std::fstream data(LocalPath(first_, "data"), std::ios::binary | std::ios::in | std::ios::out);
    for (uint64_t at = 0; at < uint64_t{first_.info.blocks} * kBlockSize; at += kBlockSize) {
      data.seekp(static_cast<std::streamoff>(at));
      data.put('!');
    }
  }
  const auto store = OpenStore(index_);
  const auto second = Attach(*store, second_, NewOrigin());
  const auto stats = std::make_shared<ReadStats>();
  EXPECT_EQ(ReadBlob(*second, 0, second->size(), stats).value(), AddressSpace(second_));
  EXPECT_EQ(stats->copied_frames, 0u);
}

TEST_F(ChunkCopyTest, RemovedSourceIsNotMissed) {
  {
    const auto store = OpenStore(index_);
    ASSERT_TRUE(ReadBlob(*Attach(*store, first_, NewOrigin())).ok());
  }
  std::filesystem::remove_all(LocalPath(first_, ""));
  const auto store = OpenStore(index_);
  const auto second = Attach(*store, second_, NewOrigin());
  EXPECT_EQ(ReadBlob(*second).value(), AddressSpace(second_));
}

TEST_F(ChunkCopyTest, DamagedChunkTableIsFetchedAgain) {
  {
    const auto store = OpenStore(index_);
    ASSERT_TRUE(ReadBlob(*Attach(*store, first_, NewOrigin())).ok());
    ASSERT_TRUE(ReadBlob(*Attach(*store, second_, NewOrigin()), 0, 1).ok());
  }
  std::filesystem::resize_file(LocalPath(second_, "chunks"), 30);
  const auto store = OpenStore(index_);
  const auto origin = NewOrigin();
  const auto second = Attach(*store, second_, origin);
  EXPECT_EQ(ReadBlob(*second).value(), AddressSpace(second_));
}

// The store on an XFS, which can share blocks between files.
class BlockSharingTest : public ChunkCopyTest {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root to mount an XFS";
    auto outer = TemporaryDirectory::Create(testing::TempDir(), "lamina-xfs-");
    ASSERT_TRUE(outer.ok());
    outer_ = std::make_unique<TemporaryDirectory>(std::move(*outer));
    const std::string image = outer_->path() + "/image";
    parent_ = outer_->path() + "/mount";
    std::filesystem::create_directory(parent_);
    ASSERT_EQ(Run("truncate -s 320M " + image), 0);
    ASSERT_EQ(Run("mkfs.xfs -q -m reflink=1 " + image), 0) << "needs xfsprogs";
    ASSERT_EQ(Run("mount -o loop " + image + " " + parent_), 0);
    mounted_ = true;
    ChunkCopyTest::SetUp();
  }
  void TearDown() override {
    index_.reset();
    root_.reset();
    if (mounted_) Run("umount -d " + parent_);
  }

  static int Run(const std::string& command) { return std::system(command.c_str()); }

  std::unique_ptr<TemporaryDirectory> outer_;
  bool mounted_ = false;
};

// True if an extent of the file shares its blocks with another file (FIEMAP, Linux 2.6.28).
bool HasSharedExtents(const std::string& path) {
  const auto file = OpenFile(path, O_RDONLY);
  EXPECT_TRUE(file.ok()) << file.status();
  constexpr uint32_t kExtents = 64;
  std::vector<std::byte> buffer(sizeof(fiemap) + kExtents * sizeof(fiemap_extent));
  auto* map = reinterpret_cast<fiemap*>(buffer.data());
  map->fm_length = FIEMAP_MAX_OFFSET;
  map->fm_flags = FIEMAP_FLAG_SYNC;
  map->fm_extent_count = kExtents;
  EXPECT_EQ(::ioctl(file->get(), FS_IOC_FIEMAP, map), 0);
  for (uint32_t i = 0; i < map->fm_mapped_extents; ++i) {
    if ((map->fm_extents[i].fe_flags & FIEMAP_EXTENT_SHARED) != 0) return true;
  }
  return false;
}

TEST_F(BlockSharingTest, SharesBlocksOfLargeChunks) {
  const auto store = OpenStore(index_);
  ASSERT_TRUE(ReadBlob(*Attach(*store, first_, NewOrigin())).ok());
  const auto second = Attach(*store, second_, NewOrigin());
  const auto stats = std::make_shared<ReadStats>();
  EXPECT_EQ(ReadBlob(*second, 0, second->size(), stats).value(), AddressSpace(second_));
  EXPECT_EQ(stats->copied_frames, second->frames().size());
  EXPECT_LT(stats->written_bytes, second->size() / 2);
  EXPECT_TRUE(HasSharedExtents(LocalPath(second_, "data")));
}

TEST_F(BlockSharingTest, SharesNoHolesWhileTheSourceIsEvicted) {
  const auto store = OpenStore(index_);
  const auto first = Attach(*store, first_, NewOrigin());
  const auto second = Attach(*store, second_, NewOrigin());
  const std::string expected = AddressSpace(second_);
  std::atomic<bool> stop{false};
  std::thread evictor([&] {
    while (!stop) store->Shrink(0);
  });
  for (int round = 0; round < 30; ++round) {
    EXPECT_TRUE(ReadLikeAMount(*first, 0, first->size()).ok());
    EXPECT_TRUE(ReadLikeAMount(*second, 0, second->size()).value_or("") == expected);
  }
  stop = true;
  evictor.join();
}

}  // namespace
}  // namespace lamina::chunkstore
