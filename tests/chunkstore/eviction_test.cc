// SPDX-License-Identifier: Apache-2.0
//
// A store whose data files are limited: what is evicted, and that nobody who reads meanwhile gets
// anything but the right bytes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "chunkstore/blob_store.h"
#include "tests/chunkstore/store_testing.h"

namespace lamina::chunkstore {
namespace {

constexpr uint64_t kFrames = kFrameSize;  // bytes of as many frames

int Repetitions(int count) {
  const char* soak = std::getenv("LAMINA_SOAK");
  return count * std::max(soak != nullptr ? std::atoi(soak) : 1, 1);
}

class EvictionTest : public StoreTest {
 protected:
  // A blob of `frames` full frames, no two equal.
  TestBlob AddFrames(int frames) {
    std::vector<std::string> files;
    for (int i = 0; i < frames; ++i) files.push_back(RandomBytes(kFrameSize, ++seed_));
    TestBlob blob = AddBlob(files);
    content_[blob.info.digest] = AddressSpace(blob);
    return blob;
  }
  std::unique_ptr<BlobStore> Open(uint64_t max_bytes, std::shared_ptr<NodeIndex> index = nullptr) {
    return OpenStore({.index = std::move(index), .threads = 4, .limits = {.max_bytes = max_bytes}});
  }
  std::shared_ptr<Blob> Attach(BlobStore& store, const TestBlob& blob) {
    auto attached = StoreTest::Attach(store, blob.descriptor(), NewOrigin());
    attached->ShareChunks();
    return attached;
  }
  // Reads frames like a mount, and expects the right bytes. Returns how many had to be fetched.
  uint64_t Read(Blob& blob, const TestBlob& expected, int first, int count) {
    const auto stats = std::make_shared<ReadStats>();
    const auto content = ReadLikeAMount(blob, first * kFrames, count * kFrames, stats);
    EXPECT_TRUE(content.ok()) << content.status();
    EXPECT_TRUE(content.ok() && *content == content_[expected.info.digest].substr(first * kFrames,
                                                                                  count * kFrames));
    return stats->fetched_frames;
  }
  // What is being fetched ahead is evicted when it has come.
  static void EvictAll(BlobStore& store, uint64_t all_but = 0) {
    do store.Shrink(0);
    while (store.GetUsage().used_bytes > all_but);
    EXPECT_EQ(store.GetUsage().used_bytes, all_but);
  }
  uint64_t DiskBytes(const TestBlob& blob) const {
    struct stat info {};
    EXPECT_EQ(::stat(LocalPath(blob, "data").c_str(), &info), 0);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  }

  int seed_ = 0;
  std::map<Digest, std::string> content_;
};

TEST_F(EvictionTest, ReadsABlobThatIsLargerThanTheCacheAndKeepsWhatFits) {
  const TestBlob blob = AddFrames(64);
  const auto store = Open(16 * kFrames);
  const auto attached = Attach(*store, blob);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 64; ++i) {
      Read(*attached, blob, i, 1);
      ASSERT_LE(attached->present_bytes(), 16 * kFrames);
    }
  }
  EXPECT_GE(attached->present_frames(), 12u);
  EXPECT_LE(store->GetUsage().used_bytes, 16 * kFrames);
  EXPECT_LE(DiskBytes(blob), 17 * kFrames);  // extents and the like take some
}

TEST_F(EvictionTest, FetchesEachFrameOfASequentialReadOnce) {
  const TestBlob blob = AddFrames(64);
  for (const uint64_t limit : {8 * kFrames, 32 * kFrames}) {
    std::filesystem::remove_all(state());
    const auto store = Open(limit);
    EXPECT_EQ(Read(*Attach(*store, blob), blob, 0, 64), 64u) << limit;
  }
}

TEST_F(EvictionTest, KeepsWhatIsUsedAgain) {
  const TestBlob blob = AddFrames(64);
  const auto store = Open(16 * kFrames);
  const auto attached = Attach(*store, blob);
  Read(*attached, blob, 0, 4);
  uint64_t fetched_again = 0;
  for (int i = 4; i < 64; ++i) {
    Read(*attached, blob, i, 1);
    fetched_again += Read(*attached, blob, i % 4, 1);
  }
  // None, but for readahead that comes late on a busy machine and takes room for a moment. First in,
  // first out would be 20.
  EXPECT_LE(fetched_again, 6u);
}

TEST_F(EvictionTest, EvictsBlobsThatAreNotAttachedFirst) {
  const TestBlob old = AddFrames(8);
  const TestBlob used = AddFrames(4);
  const TestBlob fresh = AddFrames(8);
  const auto store = Open(16 * kFrames);
  Read(*Attach(*store, old), old, 0, 8);
  const auto attached = Attach(*store, used);
  Read(*attached, used, 0, 4);
  const auto other = Attach(*store, fresh);
  Read(*other, fresh, 0, 8);
  EXPECT_EQ(attached->present_frames(), 4u);
  EXPECT_EQ(other->present_frames(), 8u);
  EXPECT_LE(DiskBytes(old), 5 * kFrames);
}

TEST_F(EvictionTest, EvictsWhatEarlierProcessesLeftOldestFirst) {
  const TestBlob old = AddFrames(16);
  const TestBlob newer = AddFrames(8);
  const TestBlob fresh = AddFrames(8);
  FillBlob(old);
  FillBlob(newer);
  const auto store = Open(24 * kFrames);
  EXPECT_EQ(store->GetUsage().used_bytes, 24 * kFrames);
  const auto attached = Attach(*store, fresh);
  Read(*attached, fresh, 0, 8);
  EXPECT_LE(store->GetUsage().used_bytes, 24 * kFrames);
  EXPECT_LE(DiskBytes(old), 9 * kFrames);
  EXPECT_GE(DiskBytes(newer), 8 * kFrames);
  EXPECT_EQ(Read(*Attach(*store, newer), newer, 0, 8), 0u);
}

TEST_F(EvictionTest, MayLeaveAloneWhatIsThereUntilABlobIsAttached) {
  const TestBlob old = AddFrames(16);
  const TestBlob fresh = AddFrames(1);
  FillBlob(old);
  const auto store = OpenStore({.limits = {.max_bytes = 8 * kFrames, .once_attached = true}});
  std::this_thread::sleep_for(std::chrono::seconds(6));  // longer than the background waits
  EXPECT_EQ(store->GetUsage().used_bytes, 16 * kFrames);
  const auto attached = Attach(*store, fresh);
  while (store->GetUsage().used_bytes > 8 * kFrames) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

TEST_F(EvictionTest, DamagedBlobsThatNobodyUsesAreRemoved) {
  const TestBlob blob = AddFrames(4);
  FillBlob(blob);
  std::filesystem::resize_file(LocalPath(blob, "frames"), 100);
  std::filesystem::resize_file(LocalPath(blob, "checksums"), 0);
  std::filesystem::copy_file(LocalPath(blob, "metadata"), LocalPath(blob, "present"),
                             std::filesystem::copy_options::overwrite_existing);
  const auto store = Open(100 * kFrames);
  EXPECT_GT(store->GetUsage().used_bytes, 0u);
  store->Shrink(0);
  EXPECT_EQ(store->GetUsage().used_bytes, 0u);
  EXPECT_TRUE(std::filesystem::is_empty(state()));
  EXPECT_EQ(Read(*Attach(*store, blob), blob, 0, 4), 4u);
}

TEST_F(EvictionTest, ABlobWhoseLayerFileIsTornIsRemoved) {
  const TestBlob blob = AddFrames(4);
  FillBlob(blob);
  std::filesystem::resize_file(LocalPath(blob, "layer"), 0);
  const auto store = Open(100 * kFrames);
  EXPECT_GT(store->GetUsage().used_bytes, 0u);
  store->Shrink(0);
  EXPECT_EQ(store->GetUsage().used_bytes, 0u);
  EXPECT_TRUE(std::filesystem::is_empty(state()));
}

TEST_F(EvictionTest, PinnedBlobsStay) {
  const TestBlob pinned = AddFrames(8);
  const TestBlob other = AddFrames(32);
  const auto store = Open(12 * kFrames);
  store->SetPinned(std::vector{pinned.descriptor().Key()});
  Read(*Attach(*store, pinned), pinned, 0, 8);
  Read(*Attach(*store, other), other, 0, 32);
  EvictAll(*store, 8 * kFrames);
  EXPECT_EQ(Read(*Attach(*store, pinned), pinned, 0, 8), 0u);
  store->SetPinned({});
  EvictAll(*store);
  EXPECT_EQ(Read(*Attach(*store, pinned), pinned, 0, 8), 8u);
}

TEST_F(EvictionTest, ARequestLargerThanTheCacheIsAnswered) {
  const TestBlob blob = AddFrames(16);
  const auto store = Open(kFrames / 2);
  const auto attached = Attach(*store, blob);
  for (int round = 0; round < 3; ++round) {
    std::string content(16 * kFrames, '\0');
    FetchResult result;
    attached->Fetch(0, content.size(), Priority::kForeground, nullptr,
                    [&, callback = result.Callback()](absl::Status status) {
                      EXPECT_TRUE(attached->Ready(0, content.size()));
                      status.Update(ReadFull(attached->data_fd(), 0,
                                             std::as_writable_bytes(std::span(content))));
                      callback(status);
                    });
    ASSERT_TRUE(result.Wait().ok());
    EXPECT_TRUE(content == AddressSpace(blob));
  }
  EvictAll(*store);
}

TEST_F(EvictionTest, AHoldKeepsContentUntilItIsLetGoOf) {
  const TestBlob blob = AddFrames(4);
  const auto store = Open(100 * kFrames);
  const auto attached = Attach(*store, blob);
  Read(*attached, blob, 0, 4);
  Blob::Hold hold = attached->HoldIfReady(0, kFrames);
  ASSERT_TRUE(hold);
  std::atomic<bool> shrunk = false;
  std::thread evict([&] {
    store->Shrink(0);
    shrunk = true;
  });
  while (attached->Ready(0, kFrames)) std::this_thread::yield();
  EXPECT_FALSE(attached->HoldIfReady(0, kFrames));
  std::string content(kFrames, '\0');
  ASSERT_TRUE(ReadFull(attached->data_fd(), 0, std::as_writable_bytes(std::span(content))).ok());
  EXPECT_TRUE(content == AddressSpace(blob).substr(0, kFrames));
  EXPECT_FALSE(shrunk);
  hold = Blob::Hold();
  evict.join();
  EXPECT_EQ(attached->present_bytes(), 0u);
  EXPECT_EQ(Read(*attached, blob, 0, 4), 4u);
}

TEST_F(EvictionTest, PrefetchEvictsWhatIsOldButNothingUsedSinceItBegan) {
  const TestBlob old = AddFrames(8);
  const TestBlob blob = AddFrames(64);
  const auto store = Open(16 * kFrames);
  Read(*Attach(*store, old), old, 0, 8);
  const auto attached = Attach(*store, blob);
  const auto stats = std::make_shared<ReadStats>();
  FetchResult prefetch;
  attached->Fetch(0, attached->size(), Priority::kPrefetch, stats, prefetch.Callback());
  EXPECT_EQ(prefetch.Wait().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DiskBytes(old), 0u);
  // As much as fits, and nothing fetched in vain.
  EXPECT_EQ(stats->fetched_frames, attached->present_frames());
  EXPECT_EQ(attached->present_frames(), 15u);
  EXPECT_EQ(Read(*attached, blob, 0, 8), 0u);
}

TEST_F(EvictionTest, AForegroundReadJoinsAPrefetchThatHasNoRoom) {
  const TestBlob blob = AddFrames(64);
  const auto store = Open(8 * kFrames);
  const auto attached = Attach(*store, blob);
  for (int round = 0; round < 50; ++round) {
    FetchResult prefetch;
    attached->Fetch(0, attached->size(), Priority::kPrefetch, nullptr, prefetch.Callback());
    Read(*attached, blob, 5 + round % 8, 1);
    prefetch.Wait().IgnoreError();
  }
}

TEST_F(EvictionTest, CountsTheSameAfterARestart) {
  const TestBlob first = AddFrames(8);
  const TestBlob second = AddBlob({TextBytes(700'000, 1), RandomBytes(5'000, 2)});
  uint64_t used = 0;
  {
    const auto store = Open(100 * kFrames);
    Read(*Attach(*store, first), first, 3, 2);
    const auto attached = Attach(*store, second);
    ASSERT_TRUE(ReadLikeAMount(*attached, 0, attached->size()).ok());
    used = store->GetUsage().used_bytes;
    EXPECT_EQ(used, 2 * kFrames + attached->size());
  }
  const auto store = Open(100 * kFrames);
  BlobStore::Usage usage = store->GetUsage();
  EXPECT_EQ(usage.used_bytes, used);
  ASSERT_EQ(usage.blobs.size(), 2u);
  for (const BlobStore::BlobUsage& blob : usage.blobs) {
    const bool is_first = blob.digest == first.info.digest;
    EXPECT_FALSE(blob.attached);
    EXPECT_EQ(blob.content_bytes, uint64_t{(is_first ? first : second).info.blocks} * kBlockSize);
    EXPECT_EQ(blob.present_bytes, is_first ? 2 * kFrames : blob.content_bytes);
    EXPECT_GT(blob.last_used, 1'600'000'000);
  }
  const auto attached = Attach(*store, first);
  EXPECT_EQ(store->GetUsage().used_bytes, used);
  EvictAll(*store);
  EXPECT_EQ(DiskBytes(first) + DiskBytes(second), 0u);
}

TEST_F(EvictionTest, RemovesABlobThatIsNotAttached) {
  auto index = NodeIndex::Open(root() + "/index");
  ASSERT_TRUE(index.ok()) << index.status();
  const std::shared_ptr<NodeIndex> shared = *std::move(index);
  const TestBlob blob = AddFrames(4);
  const auto store = Open(100 * kFrames, shared);
  auto attached = Attach(*store, blob);
  Read(*attached, blob, 0, 4);
  while (!shared->HasBlob(blob.descriptor().Key()).value()) std::this_thread::yield();
  EXPECT_EQ(store->Remove(blob.descriptor().Key()).code(), absl::StatusCode::kFailedPrecondition);
  attached.reset();
  // A task may hold it for a moment.
  absl::Status removed = store->Remove(blob.descriptor().Key());
  for (; absl::IsFailedPrecondition(removed); removed = store->Remove(blob.descriptor().Key())) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(removed.ok()) << removed;
  EXPECT_TRUE(std::filesystem::is_empty(state()));
  EXPECT_FALSE(shared->HasBlob(blob.descriptor().Key()).value());
  EXPECT_EQ(store->GetUsage().used_bytes, 0u);
  EXPECT_EQ(store->Remove(blob.descriptor().Key()).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Read(*Attach(*store, blob), blob, 0, 4), 4u);
}

// Through a pipe, as FUSE replies are sent: the pages stay the file's until the pipe is empty.
bool SpliceAndCompare(Blob& blob, uint64_t offset, std::string_view expected) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  const UniqueFd out(ends[0]);
  const UniqueFd in(ends[1]);
  std::string content(expected.size(), '\0');
  const Blob::Hold hold = blob.HoldIfReady(offset, expected.size());
  if (!hold) return true;
  auto position = static_cast<off64_t>(offset);
  for (size_t done = 0; done < content.size();) {
    const ssize_t moved =
        ::splice(blob.data_fd(), &position, in.get(), nullptr, content.size() - done, 0);
    if (moved <= 0) return false;
    std::this_thread::yield();
    for (ssize_t left = moved; left > 0;) {
      const ssize_t got = ::read(out.get(), content.data() + done, static_cast<size_t>(left));
      if (got <= 0) return false;
      done += static_cast<size_t>(got);
      left -= got;
    }
  }
  return content == expected;
}

TEST_F(EvictionTest, ManyReadersOfATinyCacheGetTheRightBytes) {
  // Two blobs share half of their content, so that chunks are copied while they are evicted.
  auto index = NodeIndex::Open(root() + "/index");
  ASSERT_TRUE(index.ok()) << index.status();
  std::vector<std::string> shared;
  for (int i = 0; i < 6; ++i) shared.push_back(TextBytes(200'000 + 300'000 * (i % 3), 100 + i));
  std::vector<TestBlob> blobs;
  for (int i = 0; i < 3; ++i) {
    std::vector<std::string> files = shared;
    if (i == 1) std::ranges::reverse(files);
    files.push_back(RandomBytes(1 << 20, i));
    blobs.push_back(AddBlob(files));
  }
  const auto store = Open(6 * kFrames, *std::move(index));
  std::vector<std::shared_ptr<Blob>> attached;
  std::vector<std::string> expected;
  for (const TestBlob& blob : blobs) {
    attached.push_back(Attach(*store, blob));
    expected.push_back(AddressSpace(blob));
  }
  std::atomic<int> wrong{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 8; ++i) {
    readers.emplace_back([&, i] {
      std::mt19937_64 random(i);
      for (int k = 0; k < Repetitions(300); ++k) {
        const size_t n = random() % blobs.size();
        const uint64_t offset = random() % expected[n].size();
        const uint64_t length = std::min<uint64_t>(random() % 600'000, expected[n].size() - offset);
        const std::string_view right = std::string_view(expected[n]).substr(offset, length);
        const auto content = ReadLikeAMount(*attached[n], offset, length);
        if (!content.ok() || *content != right) ++wrong;
        if (!SpliceAndCompare(*attached[n], offset, right.substr(0, 60'000))) ++wrong;
      }
    });
  }
  std::thread evictor([&] {
    while (!stop) store->Shrink(0);
  });
  std::thread prefetcher([&] {
    while (!stop) {
      FetchResult result;
      attached[0]->Fetch(0, attached[0]->size(), Priority::kPrefetch, nullptr, result.Callback());
      result.Wait().IgnoreError();
    }
  });
  for (std::thread& reader : readers) reader.join();
  stop = true;
  evictor.join();
  prefetcher.join();
  EXPECT_EQ(wrong, 0);
  EvictAll(*store);
  for (const TestBlob& blob : blobs) EXPECT_EQ(DiskBytes(blob), 0u);
}

TEST_F(EvictionTest, KilledAtAnyInstantItLeavesTheRightBytes) {
  const TestBlob blob = AddBlob({TextBytes(4 << 20, 1), RandomBytes(4 << 20, 2)});
  const std::string expected = AddressSpace(blob);
  std::mt19937_64 random(7);
  for (int round = 0; round < Repetitions(10); ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const auto store = Open(8 * kFrames);
      const auto attached = store->Attach(blob.descriptor(), NewOrigin());
      while (attached.ok()) ReadLikeAMount(**attached, 0, expected.size()).IgnoreError();
      ::_exit(0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 100'000));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    // Another child, since threads must not run in this process when it forks.
    const pid_t check = ::fork();
    ASSERT_GE(check, 0);
    if (check == 0) {
      const auto store = Open(8 * kFrames);
      const auto attached = store->Attach(blob.descriptor(), NewOrigin());
      const bool right =
          attached.ok() && ReadLikeAMount(**attached, 0, expected.size()).value_or("") == expected;
      ::_exit(right ? 0 : 1);
    }
    ASSERT_EQ(::waitpid(check, &status, 0), check);
    ASSERT_EQ(status, 0) << "round " << round;
  }
}

// The store on a file system of 16 MiB.
class SmallDiskTest : public OnSmallDisk<EvictionTest, 16> {
 protected:
  uint64_t FreeBytes() const {
    struct statvfs info {};
    EXPECT_EQ(::statvfs(state().c_str(), &info), 0);
    return uint64_t{info.f_bavail} * info.f_frsize;
  }
};

TEST_F(SmallDiskTest, AFullDiskEvictsInsteadOfFailing) {
  const TestBlob blob = AddFrames(100);
  const auto store = OpenStore(BlobStore::Options{.threads = 4});
  const auto attached = Attach(*store, blob);
  Read(*attached, blob, 0, 100);
  EXPECT_GT(attached->present_frames(), 10u);  // how many fit is the file system's to say
  EXPECT_GT(Read(*attached, blob, 0, 100), 10u);
}

TEST_F(SmallDiskTest, ReadsThroughADiskThatOthersHaveFilled) {
  const TestBlob blob = AddFrames(20);
  const auto store = OpenStore(BlobStore::Options{.threads = 4});
  const auto attached = Attach(*store, blob);
  Read(*attached, blob, 3, 2);
  std::ofstream(state() + "/other") << std::string(20 << 20, 'x');
  store->Shrink(attached->present_bytes() / 2);  // others take what becomes free
  std::ofstream(state() + "/another") << std::string(20 << 20, 'x');
  EXPECT_EQ(FreeBytes(), 0u);
  FetchResult result;
  attached->Fetch(10 * kFrames, 100, Priority::kForeground, nullptr, result.Callback());
  const absl::Status status = result.Wait();
  EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
  ReadStats stats;
  std::string content(kFileAlignment * 3, '\0');
  content.resize(attached->size() + 1000, 'x');  // some of the padding as well
  const auto into = std::as_writable_bytes(std::span(content)).subspan(5);
  ASSERT_TRUE(attached->ReadThrough(5, into, stats).ok());
  EXPECT_TRUE(content.substr(5) == AddressSpace(blob).substr(5) + std::string(1000, '\0'));
  EXPECT_EQ(stats.written_bytes, 0u);
  std::filesystem::remove(state() + "/other");
  std::filesystem::remove(state() + "/another");
  Read(*attached, blob, 0, 20);
}

TEST_F(SmallDiskTest, KeepsSpaceFreeForOthers) {
  const TestBlob blob = AddFrames(100);
  const auto store = OpenStore({.threads = 4, .limits = {.min_free = 8 << 20}});
  const auto attached = Attach(*store, blob);
  for (int i = 0; i < 100; ++i) {
    Read(*attached, blob, i, 1);
    ASSERT_GE(FreeBytes() + kFrameSize, 8u << 20);
  }
  EXPECT_GT(attached->present_frames(), 20u);
  // Others need more than there is: they get it, and reading goes on.
  std::ofstream(state() + "/other") << std::string(10 << 20, 'x');
  for (int i = 0; i < 1000 && FreeBytes() < 5 << 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_GE(FreeBytes(), 5u << 20);
  Read(*attached, blob, 0, 100);
}

class MemoryStoreTest : public EvictionTest {};

TEST_F(MemoryStoreTest, WritesNothingAndHoldsAFewFramesOnly) {
  const TestBlob blob = AddFrames(200);
  const auto opened = BlobStore::Open({.directory = state(), .in_memory = true});
  ASSERT_TRUE(opened.ok()) << opened.status();
  BlobStore& store = **opened;
  {
    const auto attached = Attach(store, blob);
    const auto stats = std::make_shared<ReadStats>();
    const auto content = ReadLikeAMount(*attached, 0, attached->size(), stats);
    ASSERT_TRUE(content.ok()) << content.status();
    EXPECT_TRUE(*content == AddressSpace(blob));
    EXPECT_EQ(stats->written_bytes, 0u);
    EXPECT_EQ(AsText(attached->metadata()), "metadata");
    EXPECT_LE(store.GetUsage().used_bytes, BlobStore::kMemoryCache);
    struct stat data {};
    ASSERT_EQ(::fstat(attached->data_fd(), &data), 0);
    EXPECT_LE(static_cast<uint64_t>(data.st_blocks) * 512, BlobStore::kMemoryCache);
    // What was read last is there.
    EXPECT_EQ(Read(*attached, blob, 190, 10), 0u);
  }
  EXPECT_FALSE(std::filesystem::exists(state()));
  EXPECT_EQ(store.GetUsage().used_bytes, 0u);
}

TEST_F(MemoryStoreTest, ManyReadersGetTheRightBytes) {
  const TestBlob blob = AddBlob({TextBytes(3 << 20, 1), RandomBytes(2 << 20, 2)});
  const std::string expected = AddressSpace(blob);
  const auto store =
      BlobStore::Open({.threads = 4, .limits = {.max_bytes = 4 * kFrames}, .in_memory = true});
  ASSERT_TRUE(store.ok()) << store.status();
  const auto attached = Attach(**store, blob);
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 6; ++i) {
    readers.emplace_back([&, i] {
      std::mt19937_64 random(i);
      for (int k = 0; k < Repetitions(200); ++k) {
        const uint64_t offset = random() % expected.size();
        const uint64_t length = std::min<uint64_t>(random() % 200'000, expected.size() - offset);
        const std::string_view right = std::string_view(expected).substr(offset, length);
        if (ReadLikeAMount(*attached, offset, length).value_or("") != right) ++wrong;
        if (!SpliceAndCompare(*attached, offset, right.substr(0, 60'000))) ++wrong;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace lamina::chunkstore
