// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/blob_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <thread>

#include "tests/chunkstore/store_testing.h"

namespace lamina::chunkstore {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

// A blob of `frames` full frames, each of one file that does not compress.
class BlobStoreTest : public StoreTest {
 protected:
  TestBlob AddFrames(int frames) {
    std::vector<std::string> files;
    for (int i = 0; i < frames; ++i) files.push_back(RandomBytes(kFrameSize, i));
    TestBlob blob = AddBlob(files);
    EXPECT_EQ(blob.info.frames, static_cast<uint64_t>(frames));
    return blob;
  }
};

TEST_F(BlobStoreTest, ReadsWhatWasWritten) {
  const TestBlob blob = AddBlob({TextBytes(3 << 20, 1), RandomBytes(100, 2), TextBytes(300'000, 3),
                                 RandomBytes(4096, 4), RandomBytes(1 << 20, 5)});
  const std::string expected = AddressSpace(blob);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  ASSERT_EQ(attached->size(), expected.size());
  EXPECT_EQ(AsText(attached->metadata()), "metadata");
  std::mt19937_64 random(1);
  for (int i = 0; i < 200; ++i) {
    const uint64_t offset = random() % expected.size();
    const uint64_t length = random() % std::min<uint64_t>(expected.size() - offset, 600'000);
    const auto content = ReadBlob(*attached, offset, length);
    ASSERT_TRUE(content.ok()) << content.status();
    ASSERT_TRUE(*content == expected.substr(offset, length)) << offset << " " << length;
  }
  EXPECT_LE(attached->present_frames(), attached->frames().size());
  EXPECT_EQ(ReadBlob(*attached).value(), expected);
  EXPECT_EQ(attached->present_frames(), attached->frames().size());
}

TEST_F(BlobStoreTest, PadsDataFileWithZerosThatAreAlwaysReady) {
  const TestBlob blob = AddBlob({"hello"});
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  EXPECT_EQ(attached->size(), kBlockSize);
  EXPECT_FALSE(attached->Ready(0, 1));
  EXPECT_TRUE(attached->Ready(kBlockSize, kFileAlignment - kBlockSize));
  EXPECT_TRUE(attached->Ready(0, 0));
  EXPECT_EQ(ReadBlob(*attached, kBlockSize, 10).value(), std::string(10, '\0'));
  EXPECT_EQ(ReadBlob(*attached, 0, kFileAlignment).value().substr(0, 7),
            std::string("hello\0\0", 7));
}

TEST_F(BlobStoreTest, RefusesRangesPastTheDataFile) {
  const TestBlob blob = AddBlob({"hello"});
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  EXPECT_EQ(ReadBlob(*attached, kFileAlignment, 1).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(ReadBlob(*attached, UINT64_MAX, 2).status().code(), absl::StatusCode::kOutOfRange);
  FetchResult result;
  attached->Fetch(1, UINT64_MAX, Priority::kForeground, nullptr, result.Callback());
  EXPECT_EQ(result.Wait().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(BlobStoreTest, AttachesBlobWithoutContent) {
  const TestBlob blob = AddBlob({});
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  EXPECT_EQ(attached->size(), 0u);
  EXPECT_TRUE(ReadBlob(*attached, 0, 0).ok());
  EXPECT_EQ(AsText(attached->metadata()), "metadata");
}

TEST_F(BlobStoreTest, AnswersOnTheCallersThreadIfReady) {
  const TestBlob blob = AddFrames(1);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  ASSERT_TRUE(ReadBlob(*attached).ok());
  std::thread::id thread;
  attached->Fetch(0, 100, Priority::kForeground, nullptr,
                  [&](const absl::Status&) { thread = std::this_thread::get_id(); });
  EXPECT_EQ(thread, std::this_thread::get_id());
}

TEST_F(BlobStoreTest, CountsWhatAFetchCost) {
  const TestBlob blob = AddFrames(3);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  const auto stats = std::make_shared<ReadStats>();
  ASSERT_TRUE(ReadBlob(*attached, 0, 2 * kFrameSize, stats).ok());
  EXPECT_EQ(stats->fetched_frames, 2u);
  EXPECT_EQ(stats->origin_requests, 1u);
  EXPECT_EQ(stats->fetched_bytes, attached->frames()[0].length + attached->frames()[1].length);
  EXPECT_EQ(stats->decompressed_bytes, 2 * kFrameSize);
  EXPECT_EQ(stats->written_bytes, 2 * kFrameSize);
  EXPECT_EQ(stats->copied_frames, 0u);
}

TEST_F(BlobStoreTest, FetchesAFrameOnceForManyReaders) {
  const TestBlob blob = AddFrames(1);
  const std::string expected = AddressSpace(blob);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob.descriptor(), origin);
  origin->ForgetRanges();
  origin->Hold();
  std::vector<FetchResult> results(32);
  for (size_t i = 0; i < results.size(); ++i) {
    attached->Fetch(i * kBlockSize, kBlockSize, Priority::kForeground, nullptr,
                    results[i].Callback());
  }
  origin->AwaitHeld(1);
  origin->Release();
  for (FetchResult& result : results) EXPECT_TRUE(result.Wait().ok());
  EXPECT_THAT(origin->ranges(), SizeIs(1));
  EXPECT_EQ(ReadBlob(*attached).value(), expected);
}

TEST_F(BlobStoreTest, FailureReachesAllWhoWaitAndTheNextReadTriesAgain) {
  const TestBlob blob = AddFrames(2);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob.descriptor(), origin);
  origin->FailWith(absl::UnavailableError("cable cut"));
  origin->Hold();
  std::vector<FetchResult> results(8);
  for (FetchResult& result : results) {
    attached->Fetch(kFrameSize, 100, Priority::kForeground, nullptr, result.Callback());
  }
  origin->AwaitHeld(1);
  origin->Release();
  for (FetchResult& result : results) {
    const absl::Status status = result.Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr(blob.info.digest.ToString()));
    EXPECT_THAT(std::string(status.message()), HasSubstr("frame 1"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(origin->name()));
    EXPECT_THAT(std::string(status.message()), HasSubstr("cable cut"));
  }
  EXPECT_FALSE(attached->Ready(kFrameSize, 100));
  origin->FailWith(absl::OkStatus());
  EXPECT_EQ(ReadBlob(*attached).value(), AddressSpace(blob));
}

TEST_F(BlobStoreTest, OpensTheObjectAnewAfterAFailure) {
  const TestBlob blob = AddFrames(1);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob.descriptor(), origin);
  origin->FailWith(absl::UnavailableError("stale handle"));
  EXPECT_FALSE(ReadBlob(*attached).ok());
  const int opened = origin->opened();
  origin->FailWith(absl::OkStatus());
  EXPECT_TRUE(ReadBlob(*attached).ok());
  EXPECT_EQ(origin->opened(), opened + 1);
}

TEST_F(BlobStoreTest, JoinsMissingNeighboursIntoOneRequest) {
  const TestBlob blob = AddFrames(5);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob.descriptor(), origin);
  const FrameTable& frames = attached->frames();
  // Frame 1 is there, so that 0 and 2 are not neighbours.
  ASSERT_TRUE(ReadBlob(*attached, kFrameSize, 1).ok());
  origin->ForgetRanges();
  ASSERT_TRUE(ReadBlob(*attached, 0, 4 * kFrameSize).ok());
  EXPECT_THAT(origin->ranges(),
              ElementsAre(std::pair(frames[0].offset, frames[0].length),
                          std::pair(frames[2].offset, frames[2].length + frames[3].length)));
}

TEST_F(BlobStoreTest, ExtendsRequestsToTheSizeTheOriginPrefers) {
  const TestBlob blob = AddBlob({TextBytes(1 << 20, 1), TextBytes(1 << 20, 2)});
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  origin->set_preferred_request_size(256 << 10);
  const auto attached = Attach(*store, blob.descriptor(), origin);
  ASSERT_LT(attached->frames()[0].length, 200u << 10);
  origin->ForgetRanges();
  ASSERT_TRUE(ReadBlob(*attached, 0, 1).ok());
  ASSERT_THAT(origin->ranges(), SizeIs(1));
  EXPECT_GE(origin->ranges()[0].second, 256u << 10);
  EXPECT_LT(origin->ranges()[0].second, 512u << 10);
}

TEST_F(BlobStoreTest, RandomReadsFetchWhatTheyTouchOnly) {
  const TestBlob blob = AddFrames(64);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  const auto stats = std::make_shared<ReadStats>();
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t frame = i * 37 % 64;
    ASSERT_TRUE(ReadBlob(*attached, uint64_t{frame} * kFrameSize + 4096, 4096, stats).ok());
  }
  EXPECT_EQ(stats->fetched_frames, 32u);
}

TEST_F(BlobStoreTest, SequentialReadsAreFetchedAhead) {
  const TestBlob blob = AddFrames(48);
  const std::string expected = AddressSpace(blob);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  const auto stats = std::make_shared<ReadStats>();
  int missed = 0;
  for (uint64_t offset = 0; offset < expected.size(); offset += 64 << 10) {
    missed += attached->Ready(offset, 64 << 10) ? 0 : 1;
    ASSERT_EQ(ReadBlob(*attached, offset, 64 << 10, stats).value(),
              expected.substr(offset, 64 << 10));
  }
  EXPECT_EQ(stats->fetched_frames, 48u);
  EXPECT_LT(missed, 40);  // fewer than one a frame: some were there before they were asked for
}

TEST_F(BlobStoreTest, ForegroundOvertakesPrefetch) {
  const TestBlob blob = AddFrames(40);
  const auto store = OpenStore(nullptr, /*threads=*/1);
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob.descriptor(), origin);
  origin->ForgetRanges();
  origin->Hold();
  FetchResult prefetch;
  attached->Fetch(0, 30 * kFrameSize, Priority::kPrefetch, nullptr, prefetch.Callback());
  origin->AwaitHeld(1);
  FetchResult missing;  // not asked for yet
  attached->Fetch(35 * kFrameSize, 1, Priority::kForeground, nullptr, missing.Callback());
  FetchResult queued;  // waits among the prefetched
  attached->Fetch(20 * kFrameSize, 1, Priority::kForeground, nullptr, queued.Callback());
  origin->Release();
  EXPECT_TRUE(missing.Wait().ok());
  EXPECT_TRUE(queued.Wait().ok());
  EXPECT_TRUE(prefetch.Wait().ok());
  const std::vector<ObservedOrigin::Range> ranges = origin->ranges();
  ASSERT_GE(ranges.size(), 3u);
  EXPECT_EQ(ranges[1].first, attached->frames()[35].offset);
  EXPECT_LE(ranges[2].first, attached->frames()[20].offset);
  EXPECT_GT(ranges[2].first + ranges[2].second, attached->frames()[20].offset);
}

TEST_F(BlobStoreTest, SlowPrefetchLeavesAThreadForForeground) {
  const TestBlob slow = AddFrames(40);
  const TestBlob fast = AddBlob({"hello"});
  const auto store = OpenStore(nullptr, /*threads=*/2);
  const auto slow_origin = NewOrigin();
  const auto attached = Attach(*store, slow.descriptor(), slow_origin);
  slow_origin->Hold();
  FetchResult prefetch;
  attached->Fetch(0, attached->size(), Priority::kPrefetch, nullptr, prefetch.Callback());
  slow_origin->AwaitHeld(1);
  EXPECT_TRUE(ReadBlob(*Attach(*store, fast.descriptor(), NewOrigin())).ok());
  EXPECT_FALSE(prefetch.called());
  slow_origin->Release();
  EXPECT_TRUE(prefetch.Wait().ok());
}

TEST_F(BlobStoreTest, PrefetchOfAWholeBlobMakesAllOfItReady) {
  const TestBlob blob = AddFrames(200);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob.descriptor(), NewOrigin());
  FetchResult result;
  attached->Fetch(0, attached->size(), Priority::kPrefetch, nullptr, result.Callback());
  EXPECT_TRUE(result.Wait().ok());
  EXPECT_TRUE(attached->Ready(0, attached->size()));
}

TEST_F(BlobStoreTest, ManyReadersOfAllKindsGetTheRightBytes) {
  const TestBlob blob = AddBlob(
      {TextBytes(5 << 20, 1), TextBytes(40'000, 2), TextBytes(7'000, 3), RandomBytes(2 << 20, 4)});
  const std::string expected = AddressSpace(blob);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob.descriptor(), origin);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(i);
      for (int k = 0; k < 150; ++k) {
        const uint64_t offset = i < 2 ? uint64_t(k) * 40'000 : random() % expected.size();
        const uint64_t length = std::min<uint64_t>(random() % 150'000, expected.size() - offset);
        const auto content = ReadBlob(*attached, offset, length);
        if (!content.ok() || *content != expected.substr(offset, length)) ++wrong;
      }
    });
  }
  FetchResult prefetch;
  attached->Fetch(0, attached->size(), Priority::kPrefetch, nullptr, prefetch.Callback());
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(prefetch.Wait().ok());
  EXPECT_EQ(wrong, 0);
}

TEST_F(BlobStoreTest, OneBlobIsOneObject) {
  const TestBlob blob = AddFrames(2);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  std::vector<std::shared_ptr<Blob>> blobs(8);
  std::vector<std::thread> threads;
  for (auto& attached : blobs) {
    threads.emplace_back([&] { attached = Attach(*store, blob.descriptor(), origin); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& attached : blobs) EXPECT_EQ(attached.get(), blobs[0].get());
  EXPECT_EQ(origin->opened(), 1);  // the tables were read once, and no frame yet
}

TEST_F(BlobStoreTest, FetchesEndWhenNobodyUsesTheBlob) {
  const TestBlob blob = AddFrames(60);
  const auto store = OpenStore(nullptr, /*threads=*/1);
  const auto origin = NewOrigin();
  auto attached = Attach(*store, blob.descriptor(), origin);
  origin->ForgetRanges();
  origin->Hold();
  FetchResult result;
  attached->Fetch(0, attached->size(), Priority::kPrefetch, nullptr, result.Callback());
  origin->AwaitHeld(1);
  attached.reset();
  origin->Release();
  EXPECT_EQ(result.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(origin->ranges(), SizeIs(1));
  EXPECT_EQ(ReadBlob(*Attach(*store, blob.descriptor(), origin)).value(), AddressSpace(blob));
}

TEST_F(BlobStoreTest, ClosingTheStoreFailsWhatWaits) {
  const TestBlob blob = AddFrames(60);
  auto store = OpenStore(nullptr, /*threads=*/1);
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob.descriptor(), origin);
  origin->Hold();
  FetchResult running;
  FetchResult waiting;
  attached->Fetch(0, 1, Priority::kForeground, nullptr, running.Callback());
  origin->AwaitHeld(1);
  attached->Fetch(10 * kFrameSize, 1, Priority::kForeground, nullptr, waiting.Callback());
  std::thread release([&] { origin->Release(); });
  store.reset();
  release.join();
  EXPECT_TRUE(running.called());
  EXPECT_TRUE(waiting.called());
  FetchResult late;
  attached->Fetch(20 * kFrameSize, 1, Priority::kForeground, nullptr, late.Callback());
  EXPECT_EQ(late.Wait().code(), absl::StatusCode::kCancelled);
}

TEST_F(BlobStoreTest, SecondStoreOnOneDirectoryIsRefused) {
  const auto store = OpenStore();
  const auto second = BlobStore::Open({.directory = state()});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(state()));
}

TEST_F(BlobStoreTest, AttachFailsIfTheObjectIsMissingAndLeavesNothing) {
  const TestBlob blob = AddFrames(1);
  std::filesystem::remove(ObjectPath(blob));
  const auto store = OpenStore();
  const auto attached = store->Attach(blob.descriptor(), NewOrigin());
  EXPECT_EQ(attached.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(attached.status().message()), HasSubstr(blob.info.digest.ToString()));
  EXPECT_TRUE(std::filesystem::is_empty(state()));
}

}  // namespace
}  // namespace lamina::chunkstore
