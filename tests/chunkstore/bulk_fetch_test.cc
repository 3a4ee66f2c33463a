// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/bulk_fetch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "tests/chunkstore/store_testing.h"

namespace lamina::chunkstore {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class BulkFetchTest : public StoreTest {
 protected:
  // Full frames that do not compress.
  TestBlob AddFrames(int frames, uint64_t seed = 0) {
    std::vector<std::string> files;
    for (int i = 0; i < frames; ++i) files.push_back(RandomBytes(kFrameSize, seed + i));
    return AddBlob(files);
  }
  std::shared_ptr<Blob> Attach(BlobStore& store, const TestBlob& blob,
                               std::shared_ptr<ObservedOrigin> origin) {
    auto attached = StoreTest::Attach(store, blob.descriptor(), origin);
    origin->ForgetRanges();
    return attached;
  }
  static absl::Status FetchBulk(Blob& blob, uint32_t first, uint32_t end,
                                std::shared_ptr<ReadStats> stats = nullptr) {
    FetchResult result;
    blob.FetchBulk(first, end, Priority::kBulk, {}, std::move(stats), {}, result.Callback());
    return result.Wait();
  }
  // Frames of blobs one behind the other, as an object of the layout.
  struct Pack {
    std::string path;
    std::shared_ptr<OriginObject> object;
    std::vector<BlobStore::PackedFrame> frames;
  };
  struct Part {
    std::shared_ptr<Blob> blob;
    const TestBlob* source;
    uint32_t frame;
  };
  Pack MakePack(const std::vector<Part>& parts, ObservedOrigin& origin,
                const std::function<void(std::string&)>& change = nullptr) {
    Pack pack;
    std::string content;
    for (const Part& part : parts) {
      pack.frames.push_back({part.blob, part.frame, content.size()});
      const FrameRecord& record = part.blob->frames()[part.frame];
      content += part.source->object.substr(record.offset, record.length);
    }
    if (change) change(content);
    const Digest digest = Digest::Of(AsBytes(content));
    pack.path = layout() + "/blobs/sha256/" + digest.Hex();
    std::ofstream(pack.path, std::ios::binary) << content;
    auto object = origin.Open(digest, content.size());
    EXPECT_TRUE(object.ok()) << object.status();
    pack.object = *std::move(object);
    return pack;
  }
  static absl::Status FetchPacked(BlobStore& store, const Pack& pack,
                                  std::shared_ptr<ReadStats> stats = nullptr) {
    FetchResult result;
    store.FetchPacked(pack.object, pack.frames, Priority::kBulk, {}, std::move(stats), {},
                      result.Callback());
    return result.Wait();
  }
};

TEST_F(BulkFetchTest, NeighboursAreRequestsOfEightMebibytes) {
  const TestBlob blob = AddFrames(70);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  const auto stats = std::make_shared<ReadStats>();
  ASSERT_TRUE(FetchBulk(*attached, 0, 70, stats).ok());
  EXPECT_THAT(origin->ranges(), SizeIs(3));  // 17.5 MiB
  EXPECT_EQ(stats->origin_requests, 3u);
  EXPECT_EQ(stats->fetched_frames, 70u);
  EXPECT_TRUE(attached->Ready(0, attached->size()));
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, TakesOnlyTheFramesAskedFor) {
  const TestBlob blob = AddFrames(10);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob, NewOrigin());
  ASSERT_TRUE(FetchBulk(*attached, 3, 6).ok());
  for (uint32_t i = 0; i < 10; ++i) EXPECT_EQ(attached->Present(i), i >= 3 && i < 6) << i;
  EXPECT_TRUE(FetchBulk(*attached, 8, 1000).ok());
  EXPECT_EQ(attached->present_frames(), 5u);
  EXPECT_TRUE(FetchBulk(*attached, 6, 6).ok());
}

TEST_F(BulkFetchTest, ReadsOverSmallGapsAndNotOverLargeOnes) {
  std::vector<std::string> files;
  for (int i = 0; i < 12; ++i) files.push_back(TextBytes(kFrameSize, i));  // a few KiB compressed
  for (int i = 0; i < 6; ++i) files.push_back(RandomBytes(kFrameSize, i));
  const TestBlob blob = AddBlob(files);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  ASSERT_TRUE(ReadBlob(*attached, 5 * kFrameSize, 1).ok());
  ASSERT_TRUE(ReadBlob(*attached, 14 * kFrameSize, 1).ok());
  origin->ForgetRanges();
  ASSERT_TRUE(FetchBulk(*attached, 0, 18).ok());
  EXPECT_THAT(origin->ranges(), SizeIs(2));
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, AStreamThatHasStalledKeepsNobodyWaiting) {
  const TestBlob blob = AddFrames(20);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  origin->HoldStreamsAfter(2 << 20);  // in the middle of a frame
  FetchResult bulk;
  attached->FetchBulk(0, 20, Priority::kBulk, {}, nullptr, {}, bulk.Callback());
  origin->AwaitHeld(1);
  std::vector<FetchResult> waiting(4);  // since before it is known that the stream has stalled
  for (uint32_t i = 0; i < 4; ++i) {
    attached->Fetch((7 + i) * kFrameSize, 1, Priority::kForeground, nullptr, waiting[i].Callback());
  }
  origin->TellOfSilence();
  for (FetchResult& result : waiting) EXPECT_TRUE(result.Wait().ok());
  EXPECT_FALSE(bulk.called());
  origin->Release();
  EXPECT_TRUE(bulk.Wait().ok());
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, FetchesNothingTwice) {
  const TestBlob blob = AddFrames(10);
  const auto origin = NewOrigin();
  {
    const auto store = OpenStore();
    ASSERT_TRUE(FetchBulk(*Attach(*store, blob, origin), 0, 10).ok());
  }
  const auto store = OpenStore();  // frames are there, but not verified
  const auto attached = Attach(*store, blob, origin);
  ASSERT_TRUE(FetchBulk(*attached, 0, 10).ok());
  EXPECT_THAT(origin->ranges(), IsEmpty());
  EXPECT_TRUE(attached->Ready(0, attached->size()));
}

TEST_F(BulkFetchTest, FramesAreReadyBeforeTheRequestEnds) {
  const TestBlob blob = AddFrames(20);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  origin->HoldStreamsAfter(2 << 20);
  FetchResult bulk;
  attached->FetchBulk(0, 20, Priority::kBulk, {}, nullptr, {}, bulk.Callback());
  origin->AwaitHeld(1);
  EXPECT_TRUE(ReadBlob(*attached, 2 * kFrameSize, kFrameSize).ok());
  FetchResult later;  // of what is about to come
  attached->Fetch(9 * kFrameSize, 1, Priority::kForeground, nullptr, later.Callback());
  EXPECT_FALSE(later.called());
  EXPECT_FALSE(bulk.called());
  origin->Release();
  EXPECT_TRUE(later.Wait().ok());
  EXPECT_TRUE(bulk.Wait().ok());
  EXPECT_THAT(origin->ranges(), SizeIs(1));  // the readers needed none of their own
}

// It claims what is free, and must not forget the rest, which whoever has it may let go of.
TEST_F(BulkFetchTest, EndsWhenFramesOfOthersAreThereAsWell) {
  const TestBlob blob = AddFrames(20);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  origin->HoldStreamsAfter(0);
  FetchResult first;
  std::stop_source stop;
  attached->FetchBulk(0, 10, Priority::kBulk, {}, nullptr, stop.get_token(), first.Callback());
  origin->AwaitHeld(1);
  FetchResult second;
  attached->FetchBulk(5, 10, Priority::kBulk, {}, nullptr, {}, second.Callback());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(second.called());
  stop.request_stop();  // after one frame, with the others unfetched
  origin->Release();
  EXPECT_TRUE(absl::IsCancelled(first.Wait()));
  EXPECT_TRUE(second.Wait().ok());
  for (uint32_t frame = 5; frame < 10; ++frame) EXPECT_TRUE(attached->Present(frame)) << frame;
}

TEST_F(BulkFetchTest, ReadersDoNotWaitForWhatAStreamBringsLater) {
  const TestBlob blob = AddFrames(31);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  origin->HoldStreamsAfter(2 << 20);
  const auto stats = std::make_shared<ReadStats>();
  FetchResult bulk;
  attached->FetchBulk(0, 31, Priority::kBulk, {}, stats, {}, bulk.Callback());
  origin->AwaitHeld(1);
  EXPECT_TRUE(ReadBlob(*attached, 25 * kFrameSize, 1).ok());
  // Another request does not make two streams of one.
  FetchResult other;
  attached->FetchBulk(0, 31, Priority::kBulk, {}, nullptr, {}, other.Callback());
  EXPECT_THAT(origin->ranges(), SizeIs(2));
  EXPECT_FALSE(bulk.called());
  origin->Release();
  EXPECT_TRUE(bulk.Wait().ok());
  EXPECT_TRUE(other.Wait().ok());
  EXPECT_THAT(origin->ranges(), SizeIs(2));
  EXPECT_EQ(stats->fetched_frames, 30u);
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, ReadersDoNotWaitForRequestsInTheQueue) {
  const TestBlob blob = AddFrames(60);
  const auto store = OpenStore(nullptr, /*threads=*/2);  // one for bulk
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  origin->HoldStreamsAfter(0);
  FetchResult first;
  FetchResult second;
  attached->FetchBulk(0, 30, Priority::kBulk, {}, nullptr, {}, first.Callback());
  origin->AwaitHeld(1);
  attached->FetchBulk(30, 60, Priority::kBulk, {}, nullptr, {}, second.Callback());
  EXPECT_TRUE(ReadBlob(*attached, 40 * kFrameSize, 1).ok());
  EXPECT_THAT(origin->ranges(), SizeIs(2));
  origin->Release();
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(second.Wait().ok());
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, HalfOfTheThreadsAreLeftToOthers) {
  const auto store = OpenStore(nullptr, /*threads=*/4);
  const auto origin = NewOrigin();
  const TestBlob blob = AddFrames(50);
  const auto attached = Attach(*store, blob, origin);
  origin->HoldStreamsAfter(0);
  std::vector<FetchResult> results(4);
  for (uint32_t i = 0; i < 4; ++i) {
    attached->FetchBulk(10 * i, 10 * i + 10, Priority::kBulk, {}, nullptr, {},
                        results[i].Callback());
  }
  origin->AwaitHeld(2);
  for (uint32_t frame : {48, 44, 41}) {
    EXPECT_TRUE(ReadBlob(*attached, uint64_t{frame} * kFrameSize, 1).ok());
  }
  EXPECT_THAT(origin->ranges(), SizeIs(5));  // two of the bulk requests have not begun
  origin->Release();
  for (FetchResult& result : results) EXPECT_TRUE(result.Wait().ok());
}

TEST_F(BulkFetchTest, IdleRequestsWaitForForegroundOnes) {
  const TestBlob blob = AddFrames(20);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  origin->Hold();
  FetchResult reader;
  attached->Fetch(0, 1, Priority::kForeground, nullptr, reader.Callback());
  origin->AwaitHeld(1);
  FetchResult idle;
  attached->FetchBulk(10, 20, Priority::kIdle, {}, nullptr, {}, idle.Callback());
  FetchResult bulk;
  attached->FetchBulk(5, 10, Priority::kBulk, {}, nullptr, {}, bulk.Callback());
  origin->AwaitHeld(2);
  EXPECT_THAT(origin->ranges(), SizeIs(2));
  origin->Release();
  EXPECT_TRUE(reader.Wait().ok());
  EXPECT_TRUE(bulk.Wait().ok());
  EXPECT_TRUE(idle.Wait().ok());
  EXPECT_EQ(origin->ranges().back().first, attached->frames()[10].offset);
}

TEST_F(BulkFetchTest, StopEndsARequestInTheMiddleAndServesThoseWhoWait) {
  const TestBlob blob = AddFrames(20);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  origin->HoldStreamsAfter(1 << 20);
  std::stop_source stop;
  FetchResult bulk;
  attached->FetchBulk(0, 20, Priority::kBulk, {}, nullptr, stop.get_token(), bulk.Callback());
  origin->AwaitHeld(1);
  FetchResult reader;
  attached->Fetch(18 * kFrameSize, 1, Priority::kForeground, nullptr, reader.Callback());
  stop.request_stop();
  origin->Release();
  EXPECT_TRUE(absl::IsCancelled(bulk.Wait()));
  EXPECT_TRUE(reader.Wait().ok());
  EXPECT_LT(attached->present_frames(), 10u);
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, GoesNoFurtherWhenTheBlobIsNotUsedAnyMore) {
  const TestBlob blob = AddFrames(20);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  auto attached = Attach(*store, blob, origin);
  origin->HoldStreamsAfter(1 << 20);
  FetchResult bulk;
  attached->FetchBulk(0, 20, Priority::kBulk, {}, nullptr, {}, bulk.Callback());
  origin->AwaitHeld(1);
  attached = nullptr;
  origin->Release();
  EXPECT_TRUE(absl::IsCancelled(bulk.Wait()));
}

TEST_F(BulkFetchTest, FrameThatIsWrongFailsAlone) {
  const TestBlob blob = AddFrames(10);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob, NewOrigin());
  std::fstream object(ObjectPath(blob), std::ios::in | std::ios::out | std::ios::binary);
  object.seekp(static_cast<std::streamoff>(attached->frames()[4].offset) + 100);
  object.put('x').put('y').flush();
  const absl::Status status = FetchBulk(*attached, 0, 10);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("frame 4"));
  for (uint32_t i = 0; i < 10; ++i) EXPECT_EQ(attached->Present(i), i != 4) << i;
  EXPECT_FALSE(ReadBlob(*attached, 4 * kFrameSize, 1).ok());
}

TEST_F(BulkFetchTest, FailureOfTheOriginIsReportedAndNotPoisonous) {
  const TestBlob blob = AddFrames(10);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  origin->FailWith(absl::UnavailableError("the network is down"));
  EXPECT_THAT(std::string(FetchBulk(*attached, 0, 10).message()), HasSubstr("network is down"));
  origin->FailWith(absl::OkStatus());
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, PackFillsFramesOfSeveralBlobsWithOneRequest) {
  const TestBlob a = AddFrames(10, 100);
  const TestBlob b = AddFrames(10, 200);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto first = Attach(*store, a, origin);
  const auto second = Attach(*store, b, origin);
  const Pack pack =
      MakePack({{second, &b, 7}, {first, &a, 3}, {second, &b, 2}, {first, &a, 4}}, *origin);
  const auto stats = std::make_shared<ReadStats>();
  ASSERT_TRUE(FetchPacked(*store, pack, stats).ok());
  EXPECT_THAT(origin->ranges(), SizeIs(1));
  EXPECT_EQ(stats->fetched_frames, 4u);
  EXPECT_TRUE(ReadBlob(*second, 7 * kFrameSize, kFrameSize).value() ==
              AddressSpace(b).substr(7 * kFrameSize, kFrameSize));
  EXPECT_TRUE(ReadBlob(*first, 3 * kFrameSize, 2 * kFrameSize).value() ==
              AddressSpace(a).substr(3 * kFrameSize, 2 * kFrameSize));
  EXPECT_THAT(origin->ranges(), SizeIs(1));
}

TEST_F(BulkFetchTest, PackThatLiesIsRefusedFrameByFrame) {
  const TestBlob blob = AddFrames(10);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  const Pack pack =
      MakePack({{attached, &blob, 0}, {attached, &blob, 1}, {attached, &blob, 2}}, *origin,
               [&](std::string& content) { content[attached->frames()[0].length + 50] ^= 1; });
  origin->HoldStreamsAfter(0);
  FetchResult packed;
  store->FetchPacked(pack.object, pack.frames, Priority::kBulk, {}, nullptr, {}, packed.Callback());
  origin->AwaitHeld(1);
  FetchResult reader;  // of the frame that is wrong
  attached->Fetch(kFrameSize, 1, Priority::kForeground, nullptr, reader.Callback());
  origin->Release();
  EXPECT_TRUE(absl::IsDataLoss(packed.Wait()));
  EXPECT_TRUE(reader.Wait().ok());  // from the blob
  EXPECT_TRUE(attached->Present(0));
  EXPECT_TRUE(attached->Present(2));
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, PackThatIsCutShortLeavesTheRestToTheBlob) {
  const TestBlob blob = AddFrames(10);
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  const auto attached = Attach(*store, blob, origin);
  const Pack pack = MakePack({{attached, &blob, 0}, {attached, &blob, 1}}, *origin,
                             [](std::string& content) { content.resize(content.size() - 1); });
  EXPECT_FALSE(FetchPacked(*store, pack).ok());
  EXPECT_FALSE(attached->Present(1));
  EXPECT_TRUE(ReadBlob(*attached).value() == AddressSpace(blob));
}

TEST_F(BulkFetchTest, BulkAndReadersTogetherGiveTheRightBytes) {
  const TestBlob blob = AddBlob({TextBytes(9 << 20, 1), RandomBytes(9 << 20, 2)});
  const std::string expected = AddressSpace(blob);
  const auto store = OpenStore();
  const auto attached = Attach(*store, blob, NewOrigin());
  std::atomic<int> wrong{0};
  {
    std::vector<FetchResult> results(8);
    std::vector<std::jthread> readers;
    for (uint64_t i = 0; i < 4; ++i) {
      readers.emplace_back([&, i] {
        for (uint64_t offset = i * 70'000; offset < expected.size(); offset += 300'000) {
          const uint64_t length = std::min<uint64_t>(90'000, expected.size() - offset);
          const auto content = ReadBlob(*attached, offset, length);
          if (!content.ok() || *content != expected.substr(offset, length)) ++wrong;
        }
      });
    }
    for (uint32_t i = 0; i < results.size(); ++i) {
      attached->FetchBulk(i * 7, i * 7 + 20, i % 2 == 0 ? Priority::kBulk : Priority::kIdle, {},
                          nullptr, {}, results[i].Callback());
    }
    for (FetchResult& result : results) EXPECT_TRUE(result.Wait().ok());
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace lamina::chunkstore
