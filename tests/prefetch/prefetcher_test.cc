// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/prefetcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <future>
#include <thread>

#include "tests/chunkstore/store_testing.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::BlobStore;
using chunkstore::kFrameSize;
using chunkstore::ObservedOrigin;
using chunkstore::ReadStats;
using chunkstore::TestBlob;
using testing::IsEmpty;
using testing::SizeIs;
using Rest = Prefetcher::Work::Rest;
using Clock = std::chrono::steady_clock;

class PrefetcherTest : public chunkstore::StoreTest {
 protected:
  // Full frames that do not compress.
  void AddFrames(int frames) {
    std::vector<std::string> files;
    for (int i = 0; i < frames; ++i) {
      files.push_back(chunkstore::RandomBytes(kFrameSize, 1000 * sources_.size() + i));
    }
    sources_.push_back(AddBlob(files));
  }
  void Open(int threads = 4, const chunkstore::CacheLimits& limits = {}) {
    store_ = BlobStore::Open({.directory = state(), .threads = threads, .limits = limits}).value();
    for (const TestBlob& source : sources_) {
      blobs_.push_back(store_->Attach(source.descriptor(), origin_ = NewOrigin()).value());
      origin_->ForgetRanges();
    }
    prefetcher_ = std::make_unique<Prefetcher>(*store_);
  }
  void TearDown() override {
    if (origin_ != nullptr) origin_->Release();
    ticket_ = nullptr;
    prefetcher_ = nullptr;
    blobs_.clear();
    store_ = nullptr;
    StoreTest::TearDown();
  }
  // Starts the work, and returns its end.
  std::future<absl::Status> Start(Prefetcher::Work work) {
    auto end = std::make_shared<std::promise<absl::Status>>();
    work.blobs = blobs_;
    work.done = [end](absl::Status status) { end->set_value(std::move(status)); };
    ticket_ = prefetcher_->Start(std::move(work));
    return end->get_future();
  }

  std::vector<TestBlob> sources_;
  std::unique_ptr<BlobStore> store_;
  std::shared_ptr<ObservedOrigin> origin_;  // of the last blob
  std::vector<std::shared_ptr<Blob>> blobs_;
  std::unique_ptr<Prefetcher> prefetcher_;
  std::unique_ptr<Prefetcher::Ticket> ticket_;
};

TEST_F(PrefetcherTest, FetchesThePlanAndNothingElse) {
  AddFrames(20);
  Open();
  const auto stats = std::make_shared<ReadStats>();
  ASSERT_TRUE(Start({.plan = {{0, 10, 15}, {0, 2, 3}}, .stats = stats}).get().ok());
  for (uint32_t i = 0; i < 20; ++i) {
    EXPECT_EQ(blobs_[0]->Present(i), (i >= 10 && i < 15) || i == 2) << i;
  }
  EXPECT_THAT(origin_->ranges(), SizeIs(2));
  EXPECT_EQ(stats->fetched_frames, 6u);
}

TEST_F(PrefetcherTest, WholeImageTakesOneRequestForFourMebibytesOrMore) {
  AddFrames(3);
  AddFrames(200);
  Open();
  ASSERT_TRUE(Start({.rest = Rest::kNow}).get().ok());
  EXPECT_LE(origin_->ranges().size(), 200 * kFrameSize / (4 << 20));
  for (const auto& blob : blobs_) EXPECT_EQ(blob->present_frames(), blob->frames().size());
}

TEST_F(PrefetcherTest, WhatIsThereIsNotFetchedAgain) {
  AddFrames(20);
  Open();
  ASSERT_TRUE(Start({.rest = Rest::kNow}).get().ok());
  origin_->ForgetRanges();
  ASSERT_TRUE(Start({.plan = {{0, 0, 20}}, .rest = Rest::kNow}).get().ok());
  EXPECT_THAT(origin_->ranges(), IsEmpty());
}

TEST_F(PrefetcherTest, NoWorkIsDoneAtOnce) {
  AddFrames(1);
  Open();
  EXPECT_TRUE(Start({}).get().ok());
  EXPECT_THAT(origin_->ranges(), IsEmpty());
}

TEST_F(PrefetcherTest, FirstErrorEndsTheWork) {
  AddFrames(200);
  Open();
  origin_->FailWith(absl::UnavailableError("the network is down"));
  EXPECT_TRUE(absl::IsUnavailable(Start({.rest = Rest::kNow}).get()));
  EXPECT_LE(origin_->ranges().size(), 4u);
  origin_->FailWith(absl::OkStatus());
  EXPECT_TRUE(Start({.rest = Rest::kNow}).get().ok());
}

TEST_F(PrefetcherTest, FillGoesOnAfterAnError) {
  AddFrames(100);
  Open();
  origin_->FailWith(absl::UnavailableError("the network is down"));
  ticket_ = prefetcher_->Start({.blobs = blobs_, .rest = Rest::kWhenIdle});
  while (origin_->ranges().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  origin_->FailWith(absl::OkStatus());
  while (blobs_[0]->present_frames() < 100) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST_F(PrefetcherTest, NothingIsBegunOnceTheTicketIsGone) {
  AddFrames(300);
  Open();
  origin_->HoldStreamsAfter(1 << 20);
  const auto end = Start({.rest = Rest::kNow});
  origin_->AwaitHeld(2);
  ticket_ = nullptr;
  origin_->Release();
  std::weak_ptr<Blob> blob = blobs_[0];
  blobs_.clear();
  while (!blob.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  prefetcher_ = nullptr;
  store_ = nullptr;  // waits for what runs
  EXPECT_THAT(origin_->ranges(), SizeIs(2));
}

TEST_F(PrefetcherTest, ReadersAreServedWhileItRuns) {
  AddFrames(300);
  Open();
  origin_->HoldStreamsAfter(0);
  const auto end = Start({.rest = Rest::kNow});
  origin_->AwaitHeld(2);                    // all that may run
  for (uint32_t frame : {290, 280, 270}) {  // far from what is under way
    EXPECT_TRUE(ReadBlob(*blobs_[0], uint64_t{frame} * kFrameSize, 4096).ok());
  }
  origin_->Release();
}

TEST_F(PrefetcherTest, FillsNoMoreThanTheCacheHolds) {
  AddFrames(100);  // 25 MiB
  Open(4, {.max_bytes = 10 << 20});
  const auto stats = std::make_shared<ReadStats>();
  EXPECT_TRUE(absl::IsResourceExhausted(Start({.rest = Rest::kNow, .stats = stats}).get()));
  EXPECT_LE(stats->fetched_frames, 72u);  // and the request in which the limit was reached
  const auto leave = std::make_shared<ReadStats>();
  ASSERT_TRUE(Start({.plan = {{0, 0, 10}}, .stats = leave}).get().ok());
}

TEST_F(PrefetcherTest, WhatItHasFetchedIsNotEvictedForWhatComesLater) {
  AddFrames(100);  // 25 MiB
  Open(4, {.max_bytes = 10 << 20});
  const auto stats = std::make_shared<ReadStats>();
  // Requests of 4 MiB, one after the other.
  EXPECT_TRUE(absl::IsResourceExhausted(
      Start({.rest = Rest::kNow, .bytes_per_second = 16 << 20, .stats = stats}).get()));
  EXPECT_GE(stats->fetched_frames, 32u);
  EXPECT_EQ(blobs_[0]->present_frames(), stats->fetched_frames);
}

TEST_F(PrefetcherTest, ObeysTheRateLimit) {
  AddFrames(12);  // 3 MiB
  Open();
  const Clock::time_point start = Clock::now();
  ASSERT_TRUE(Start({.rest = Rest::kNow, .bytes_per_second = 4 << 20}).get().ok());
  // The first MiB is free, those that follow wait for it.
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(450));
}

TEST_F(PrefetcherTest, PlanMayTakeItsTimeAndBeStopped) {
  AddFrames(2);
  Open();
  auto ticket = prefetcher_->Start({.blobs = blobs_},
                                   [](const std::stop_token& stop, Prefetcher::Work& work) {
                                     while (!stop.stop_requested())
                                       std::this_thread::sleep_for(std::chrono::milliseconds(1));
                                     work.plan = {{0, 0, 2}};
                                   });
  ticket = nullptr;
  prefetcher_ = nullptr;
  EXPECT_THAT(origin_->ranges(), IsEmpty());
}

TEST_F(PrefetcherTest, PackIsUsedFirstAndThePlanBringsWhatItLacks) {
  AddFrames(40);
  Open();
  std::string content;
  PackContent pack;
  for (uint32_t frame : {30, 2, 17, 25}) {
    const auto& record = blobs_[0]->frames()[frame];
    pack.frames.push_back({0, frame, content.size()});
    content += sources_[0].object.substr(record.offset, record.length);
  }
  content[content.size() - 10] ^= 1;  // frame 25
  const Digest digest = Digest::Of(AsBytes(content));
  std::ofstream(layout() + "/blobs/sha256/" + digest.Hex(), std::ios::binary) << content;
  pack.object = origin_->Open(digest, content.size()).value();
  const std::vector<FrameSpan> plan = {{0, 30, 31}, {0, 2, 3}, {0, 17, 18}, {0, 25, 26}};
  ASSERT_TRUE(Start({.pack = pack, .plan = plan}).get().ok());
  EXPECT_EQ(blobs_[0]->present_frames(), 4u);
  EXPECT_THAT(origin_->ranges(), SizeIs(2));  // the pack, and the frame that it had wrong
}

// A reader of most of the image, one frame after the other.
TEST_F(PrefetcherTest, StreamsAheadOfReadersOfTheWholeImageAndNoFurther) {
  AddFrames(600);
  Open();
  const auto readers = std::make_shared<ReadStats>();
  const auto stats = std::make_shared<ReadStats>();
  ticket_ = prefetcher_->Start({.blobs = blobs_, .stats = stats, .readers = readers});
  const auto read = [&](uint32_t first, uint32_t end) {
    for (uint32_t i = first; i < end; ++i) {
      readers->read_bytes += kFrameSize;
      ++readers->read_requests;
      readers->activity.Wake();
      ASSERT_TRUE(ReadBlob(*blobs_[0], uint64_t{i} * kFrameSize, kFrameSize, readers).ok());
    }
  };
  read(0, 20);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(stats->fetched_frames, 0u);  // too early to tell
  read(20, 120);
  while (stats->fetched_frames < 100) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  // As much as was read, and what may be streamed in advance, and a request of each thread.
  EXPECT_LE(stats->fetched_frames, 120u + 128 + 4 * 32);
  read(120, 600);
  EXPECT_EQ(blobs_[0]->present_frames(), 600u);
}

TEST_F(PrefetcherTest, RandomReadersAreNotStreamed) {
  AddFrames(600);
  Open();
  const auto readers = std::make_shared<ReadStats>();
  const auto stats = std::make_shared<ReadStats>();
  ticket_ = prefetcher_->Start({.blobs = blobs_, .stats = stats, .readers = readers});
  for (uint64_t i = 0; i < 600; i += 5) {
    readers->read_bytes += 4096;
    ASSERT_TRUE(ReadBlob(*blobs_[0], i * kFrameSize, 4096, readers).ok());
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(stats->fetched_frames, 0u);
}

// A program and its libraries: pieces of 2 MiB that lie apart.
TEST_F(PrefetcherTest, StartsAreNotStreamed) {
  AddFrames(600);
  Open();
  const auto readers = std::make_shared<ReadStats>();
  const auto stats = std::make_shared<ReadStats>();
  ticket_ = prefetcher_->Start({.blobs = blobs_, .stats = stats, .readers = readers});
  for (uint64_t library = 0; library < 15; ++library) {
    for (uint64_t i = 0; i < 8; ++i) {
      readers->read_bytes += kFrameSize;
      ++readers->read_requests;
      readers->activity.Wake();
      const uint64_t offset = (40 * library + i) * kFrameSize;
      ASSERT_TRUE(ReadBlob(*blobs_[0], offset, kFrameSize, readers).ok());
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(stats->fetched_frames, 0u);
}

}  // namespace
}  // namespace lamina::fs
