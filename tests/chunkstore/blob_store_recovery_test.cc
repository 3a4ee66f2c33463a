// SPDX-License-Identifier: Apache-2.0
//
// What a store makes of damaged local files, of origins that lie, of a full disk and of being
// killed.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "chunkstore/blob_store.h"
#include "chunkstore/local_blob.h"
#include "tests/chunkstore/store_testing.h"

namespace lamina::chunkstore {
namespace {

using testing::HasSubstr;

// Turns around one bit of a file.
void FlipBit(const std::string& path, uint64_t offset) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  ASSERT_TRUE(file.is_open()) << path;
  file.seekg(static_cast<std::streamoff>(offset));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(byte ^ 0x10));
}

class RecoveryTest : public StoreTest {
 protected:
  TestBlob AddMixedBlob() {
    return AddBlob({TextBytes(2 << 20, 1), RandomBytes(5000, 2), TextBytes(20'000, 3),
                    RandomBytes(700'000, 4)});
  }

  // Opens the store anew, reads the whole blob, and returns what it cost.
  std::shared_ptr<ReadStats> ExpectReadable(const TestBlob& blob) {
    const auto stats = std::make_shared<ReadStats>();
    const auto store = OpenStore();
    const auto attached = store->Attach(blob.descriptor(), NewOrigin());
    EXPECT_TRUE(attached.ok()) << attached.status();
    if (!attached.ok()) return stats;
    const auto content = ReadBlob(**attached, 0, (*attached)->size(), stats);
    EXPECT_TRUE(content.ok()) << content.status();
    EXPECT_TRUE(content.ok() && *content == AddressSpace(blob));
    EXPECT_EQ(AsText((*attached)->metadata()), "metadata");
    return stats;
  }
};

TEST_F(RecoveryTest, ReadsFromTheLocalDiskAfterARestart) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, 0u);
}

TEST_F(RecoveryTest, NeedsNoOriginForWhatIsComplete) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  std::filesystem::remove(ObjectPath(blob));
  ExpectReadable(blob);
  const auto store = OpenStore();
  const auto attached = store->Attach(blob.descriptor(), nullptr);
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_TRUE(ReadBlob(**attached).ok());
}

TEST_F(RecoveryTest, FetchesDamagedFramesAgain) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  FlipBit(LocalPath(blob, "data"), 300'000);
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, 1u);
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, 0u);
}

TEST_F(RecoveryTest, FetchesFramesAgainThatBecameHoles) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  const auto data = OpenFile(LocalPath(blob, "data"), O_RDWR);
  ASSERT_TRUE(data.ok());
  ASSERT_EQ(::fallocate(data->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096), 0);
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, 1u);
}

TEST_F(RecoveryTest, FetchesWhatATruncatedDataFileLost) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  std::filesystem::resize_file(LocalPath(blob, "data"), 1 << 20);
  EXPECT_GT(ExpectReadable(blob)->fetched_frames, 1u);
}

TEST_F(RecoveryTest, NoticesADataFileThatIsCutWhileItIsUsed) {
  const TestBlob blob = AddMixedBlob();
  const auto store = OpenStore();
  const auto attached = store->Attach(blob.descriptor(), NewOrigin());
  ASSERT_TRUE(attached.ok()) << attached.status();
  ASSERT_TRUE(ReadBlob(**attached).ok());
  std::filesystem::resize_file(LocalPath(blob, "data"), 0);
  // Errors or zeros until then.
  const auto is_right = [&] {
    const auto content = ReadBlob(**attached);
    return content.ok() && *content == AddressSpace(blob);
  };
  EXPECT_FALSE(is_right());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  bool right = is_right();
  while (!right && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    right = is_right();
  }
  EXPECT_TRUE(right);
  EXPECT_EQ(std::filesystem::file_size(LocalPath(blob, "data")) % kFileAlignment, 0u);
}

TEST_F(RecoveryTest, IsNotMisledByTheDataOfAnotherBlob) {
  const TestBlob blob = AddMixedBlob();
  const TestBlob other = AddBlob({RandomBytes(3 << 20, 77)});
  FillBlob(blob);
  FillBlob(other);
  std::filesystem::copy_file(LocalPath(other, "data"), LocalPath(blob, "data"),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, blob.info.frames);
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, 0u);
}

TEST_F(RecoveryTest, ABitmapThatLiesCostsNoMoreThanALook) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  std::filesystem::resize_file(LocalPath(blob, "data"), 0);
  const auto store = OpenStore();
  const auto attached = store->Attach(blob.descriptor(), NewOrigin());
  ASSERT_TRUE(attached.ok()) << attached.status();
  const uint64_t claimed = store->GetUsage().used_bytes;
  EXPECT_EQ(claimed, (*attached)->size());
  EXPECT_TRUE(ReadBlob(**attached).value() == AddressSpace(blob));
  EXPECT_EQ(store->GetUsage().used_bytes, claimed);
}

TEST_F(RecoveryTest, BytesWhoseBitsAreGoneAreCountedAndThenRemoved) {
  const TestBlob blob = AddBlob({RandomBytes(8 << 20, 1), TextBytes(1 << 20, 2)});
  const auto disk_bytes = [&] {
    struct stat info {};
    EXPECT_EQ(::stat(LocalPath(blob, "data").c_str(), &info), 0);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  };
  FillBlob(blob);
  std::filesystem::resize_file(LocalPath(blob, "present"), 0);  // as a crash of the machine may
  {
    const auto store = OpenStore();
    EXPECT_EQ(store->GetUsage().used_bytes, disk_bytes());
    const auto attached = store->Attach(blob.descriptor(), NewOrigin());
    ASSERT_TRUE(attached.ok()) << attached.status();
    EXPECT_LT(disk_bytes(), 64u << 10);
    EXPECT_EQ(store->GetUsage().used_bytes, 0u);
  }
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, blob.info.frames);
  // What is present stays.
  std::string present = ReadFileToString(LocalPath(blob, "present"), 64).value();
  present[0] = '\x0f';
  present.replace(1, present.size() - 1, present.size() - 1, '\0');
  std::ofstream(LocalPath(blob, "present"), std::ios::binary) << present;
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, blob.info.frames - 4);
}

TEST_F(RecoveryTest, IsNotMisledByDamagedOrMissingLocalFiles) {
  const TestBlob blob = AddMixedBlob();
  for (const std::string file :
       {"layer", "sections", "frames", "metadata", "checksums", "present", "data"}) {
    SCOPED_TRACE(file);
    const std::string path = LocalPath(blob, file);
    FillBlob(blob);
    FlipBit(path, 2);
    ExpectReadable(blob);
    FillBlob(blob);
    std::filesystem::resize_file(path, 5);
    ExpectReadable(blob);
    FillBlob(blob);
    std::filesystem::resize_file(path, 0);
    ExpectReadable(blob);
    FillBlob(blob);
    std::filesystem::resize_file(path, 64 << 20);
    ExpectReadable(blob);
    FillBlob(blob);
    std::filesystem::remove(path);
    ExpectReadable(blob);
    FillBlob(blob);
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);
    const auto store = OpenStore();
    const auto attached = store->Attach(blob.descriptor(), NewOrigin());
    if (attached.ok()) {
      EXPECT_TRUE(ReadBlob(**attached).value() == AddressSpace(blob));
    }
    std::filesystem::remove_all(LocalPath(blob, ""));
  }
}

TEST_F(RecoveryTest, AFailureThatSaysNothingOfTheFilesIsNoDamage) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const std::string directory = std::filesystem::path(LocalPath(blob, "data")).parent_path();
  const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status open = LocalBlob::Open(directory, blob.descriptor()).status();
  const absl::Status descriptor = DescriptorOf(directory).status();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(open)) << open;
  EXPECT_TRUE(absl::IsResourceExhausted(descriptor)) << descriptor;
  EXPECT_TRUE(LocalBlob::Open(directory, blob.descriptor()).ok());
}

TEST_F(RecoveryTest, KeepsFetchedFramesWhenOnlyTablesAreDamaged) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  FlipBit(LocalPath(blob, "frames"), 40);
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, 0u);
}

TEST_F(RecoveryTest, DropsDataThatBelongsToAnotherSectionTable) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  FlipBit(LocalPath(blob, "sections"), 40);
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, blob.info.frames);
}

TEST_F(RecoveryTest, SaysWhyDamagedTablesCannotBeRepaired) {
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  FlipBit(LocalPath(blob, "metadata"), 0);
  std::filesystem::remove(ObjectPath(blob));
  const auto store = OpenStore();
  EXPECT_EQ(store->Attach(blob.descriptor(), NewOrigin()).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(RecoveryTest, RemovesWhatAKilledProcessLeftBehind) {
  std::filesystem::create_directories(state() + "/.new-abc/blob");
  OpenStore();
  EXPECT_TRUE(std::filesystem::is_empty(state()));
}

TEST_F(RecoveryTest, RemovesBlobsOfEarlierVersions) {
  std::filesystem::create_directories(state() + "/" + Digest::Of({}).Hex());
  std::ofstream(state() + "/" + Digest::Of({}).Hex() + "/sections") << "content";
  const TestBlob blob = AddMixedBlob();
  FillBlob(blob);
  EXPECT_FALSE(std::filesystem::exists(state() + "/" + Digest::Of({}).Hex()));
  EXPECT_EQ(ExpectReadable(blob)->fetched_frames, 0u);
}

TEST_F(RecoveryTest, NeverServesAFlippedBitOfTheOrigin) {
  const TestBlob blob = AddMixedBlob();
  const std::string expected = AddressSpace(blob);
  std::mt19937_64 random(1);
  for (int i = 0; i < 40; ++i) {
    // The last part of the object is the tables, half of the flips go there.
    const uint64_t tables = blob.object.size() - blob.info.section_table_offset + 2000;
    const uint64_t offset =
        i % 2 == 0 ? random() % blob.object.size() : blob.object.size() - 1 - random() % tables;
    SCOPED_TRACE(offset);
    FlipBit(ObjectPath(blob), offset);
    {
      const auto store = OpenStore();
      const auto attached = store->Attach(blob.descriptor(), NewOrigin());
      if (attached.ok()) {
        for (uint64_t at = 0; at < expected.size(); at += kFrameSize) {
          const uint64_t length = std::min<uint64_t>(kFrameSize, expected.size() - at);
          const auto content = ReadBlob(**attached, at, length);
          EXPECT_TRUE(!content.ok() || *content == expected.substr(at, length));
        }
      }
    }
    FlipBit(ObjectPath(blob), offset);
    std::filesystem::remove_all(state());
  }
}

TEST_F(RecoveryTest, FlippedBitInAFrameIsAnErrorThatNamesFrameAndOrigin) {
  const TestBlob blob = AddMixedBlob();
  FlipBit(ObjectPath(blob), 100);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = store->Attach(blob.descriptor(), origin);
  ASSERT_TRUE(attached.ok()) << attached.status();
  const absl::Status status = ReadBlob(**attached, 0, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("frame 0"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(origin->name()));
  EXPECT_EQ((*attached)->present_frames(), 0u);
  FlipBit(ObjectPath(blob), 100);
  EXPECT_TRUE(ReadBlob(**attached, 0, 1).ok());
}

TEST_F(RecoveryTest, TruncatedObjectIsAnErrorUntilItIsWholeAgain) {
  const TestBlob blob = AddMixedBlob();
  const auto store = OpenStore();
  const auto attached = store->Attach(blob.descriptor(), NewOrigin());
  ASSERT_TRUE(attached.ok()) << attached.status();
  std::filesystem::resize_file(ObjectPath(blob), (*attached)->frames()[3].offset + 10);
  EXPECT_EQ(ReadBlob(**attached).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadBlob(**attached, 4 * kFrameSize, 1).status().code(), absl::StatusCode::kDataLoss);
  std::ofstream(ObjectPath(blob), std::ios::binary) << blob.object;
  EXPECT_TRUE(ReadBlob(**attached).value() == AddressSpace(blob));
}

TEST_F(RecoveryTest, HoldsEveryByteItHadWhenKilledAtAnyInstant) {
  // LAMINA_SOAK=1000 for a long run.
  const char* soak = std::getenv("LAMINA_SOAK");
  const int rounds = soak != nullptr ? std::atoi(soak) : 10;
  const TestBlob blob = AddBlob({TextBytes(4 << 20, 1), RandomBytes(4 << 20, 2)});
  const std::string expected = AddressSpace(blob);
  std::mt19937_64 random(rounds);
  for (int round = 0; round < rounds; ++round) {
    if (round % 4 == 0) std::filesystem::remove_all(state());
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const auto store = OpenStore();
      const auto attached = store->Attach(blob.descriptor(), NewOrigin());
      if (attached.ok()) ReadBlob(**attached).IgnoreError();
      ::_exit(0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 25'000));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);

    // Another child, since threads must not run in this process when it forks.
    const pid_t check = ::fork();
    ASSERT_GE(check, 0);
    if (check == 0) {
      const auto store = OpenStore();
      const auto attached = store->Attach(blob.descriptor(), NewOrigin());
      const auto half = attached.ok() ? ReadBlob(**attached, 0, expected.size() / 2)
                                      : absl::StatusOr<std::string>(attached.status());
      ::_exit(half.ok() && *half == expected.substr(0, expected.size() / 2) ? 0 : 1);
    }
    ASSERT_EQ(::waitpid(check, &status, 0), check);
    ASSERT_EQ(status, 0) << "round " << round;
  }
  ExpectReadable(blob);
}

// The store on a file system of 4 MiB.
// A store on a file system that cannot write all of it to its disk, and says so only afterwards.
class FailingDiskTest : public RecoveryTest {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root to mount a file system";
    RecoveryTest::SetUp();
    std::filesystem::create_directories(state());
    std::filesystem::create_directories(backing());
    ASSERT_EQ(::mount("tmpfs", backing().c_str(), "tmpfs", 0, "size=6m"), 0);
    std::ofstream(backing() + "/image").close();
    std::filesystem::resize_file(backing() + "/image", 64 << 20);
    const std::string commands =
        "export PATH=$PATH:/usr/sbin:/sbin; mkfs.ext4 -q -O ^has_journal " + backing() +
        "/image && mount -o loop " + backing() + "/image " + state();
    if (std::system(commands.c_str()) != 0) GTEST_SKIP() << "needs ext4 on a loop device";
  }
  void TearDown() override {
    if (root_ == nullptr) return;
    ::umount2(state().c_str(), MNT_DETACH);
    ::umount2(backing().c_str(), MNT_DETACH);
  }
  std::string backing() const { return root() + "/backing"; }
};

TEST_F(FailingDiskTest, WhatTheDiskDidNotTakeIsNotReadAsZeros) {
  const TestBlob blob = AddBlob({RandomBytes(16 << 20, 1)});
  const auto store = OpenStore();
  const auto attached = store->Attach(blob.descriptor(), NewOrigin());
  ASSERT_TRUE(attached.ok()) << attached.status();
  const std::string expected = AddressSpace(blob);
  ASSERT_TRUE(ReadBlob(**attached).value() == expected);
  {
    const auto directory = OpenFile(state(), O_RDONLY);
    ASSERT_TRUE(directory.ok());
    EXPECT_NE(::syncfs(directory->get()), 0);
  }
  // As when memory is needed for something else.
  ::posix_fadvise((*attached)->data_fd(), 0, 0, POSIX_FADV_DONTNEED);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(12);
  while ((*attached)->Ready(0, (*attached)->size()) &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const auto stats = std::make_shared<ReadStats>();
  const auto content = ReadLikeAMount(**attached, 0, (*attached)->size(), stats);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_TRUE(*content == expected);
  EXPECT_GT(stats->fetched_frames, 0u);                // what was lost
  EXPECT_LT(stats->fetched_frames, blob.info.frames);  // and no more
}

using FullDiskTest = OnSmallDisk<RecoveryTest, 4>;

TEST_F(FullDiskTest, ReadsFailWithAReasonAndGoOnWhenThereIsSpace) {
  const TestBlob blob = AddBlob({RandomBytes(3 << 20, 1)});
  const std::string expected = AddressSpace(blob);
  { std::ofstream(state() + "/.filler") << std::string(2 << 20, 'x'); }
  const auto opened = BlobStore::Open({.directory = state(), .threads = 2});
  ASSERT_TRUE(opened.ok());
  std::ofstream(state() + "/filler") << std::string(2 << 20, 'x');
  const auto attached = (*opened)->Attach(blob.descriptor(), NewOrigin());
  ASSERT_TRUE(attached.ok()) << attached.status();
  // What was read before may be evicted for what is read now, but not while it is being read.
  const auto full = ReadBlob(**attached);
  EXPECT_TRUE(full.ok() ? *full == expected : absl::IsResourceExhausted(full.status()))
      << full.status();
  EXPECT_LT((*attached)->present_frames(), blob.info.frames);
  for (uint32_t i = 0; i < (*attached)->frames().size(); ++i) {
    const uint64_t offset = uint64_t{i} * kFrameSize;
    const auto content = ReadLikeAMount(**attached, offset, kFrameSize);
    EXPECT_TRUE(!content.ok() || *content == expected.substr(offset, kFrameSize));
  }
  std::filesystem::remove(state() + "/filler");
  const auto content = ReadBlob(**attached);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_TRUE(*content == expected);
}

TEST_F(FullDiskTest, AttachFailsWithAReasonAndLeavesNothing) {
  const TestBlob blob = AddMixedBlob();
  auto store = OpenStore();
  std::ofstream(state() + "/filler") << std::string(8 << 20, 'x');
  EXPECT_EQ(store->Attach(blob.descriptor(), NewOrigin()).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(state()), {}), 1);
  std::filesystem::remove(state() + "/filler");
  store.reset();
  ExpectReadable(blob);
}

}  // namespace
}  // namespace lamina::chunkstore
