// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/touch_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/chunkstore/store_testing.h"

namespace lamina::chunkstore {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;
using testing::SizeIs;

class TouchRecorderTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    store_ = OpenStore();
    for (uint64_t seed : {1, 2}) {
      const TestBlob blob = AddBlob({RandomBytes(8 * kFrameSize, seed)});
      blobs_.push_back(store_->Attach(blob.descriptor(), NewOrigin()).value());
    }
  }
  static std::vector<std::pair<uint32_t, uint32_t>> Frames(const std::vector<Touch>& touches) {
    std::vector<std::pair<uint32_t, uint32_t>> frames;
    for (const Touch& touch : touches) frames.emplace_back(touch.blob, touch.frame);
    return frames;
  }

  std::unique_ptr<BlobStore> store_;
  std::vector<std::shared_ptr<Blob>> blobs_;
  TouchRecorder recorder_;
};

TEST_F(TouchRecorderTest, NotesFirstTouchesInOrder) {
  ASSERT_TRUE(recorder_.Start(blobs_).ok());
  recorder_.Note(*blobs_[1], 3 * kFrameSize, 1);
  recorder_.Note(*blobs_[0], kFrameSize - 1, 2);
  recorder_.Note(*blobs_[1], 3 * kFrameSize + 100, kFrameSize);
  const auto touches = recorder_.Stop();
  ASSERT_TRUE(touches.ok()) << touches.status();
  EXPECT_THAT(Frames(*touches), ElementsAre(Pair(1, 3), Pair(0, 0), Pair(0, 1), Pair(1, 4)));
  for (size_t i = 1; i < touches->size(); ++i) {
    EXPECT_GE((*touches)[i].microseconds, (*touches)[i - 1].microseconds);
  }
}

TEST_F(TouchRecorderTest, NotesNothingBeforeAndAfter) {
  recorder_.Note(*blobs_[0], 0, 1);
  EXPECT_FALSE(recorder_.recording());
  ASSERT_TRUE(recorder_.Start(blobs_).ok());
  EXPECT_TRUE(recorder_.recording());
  ASSERT_TRUE(recorder_.Stop().ok());
  recorder_.Note(*blobs_[0], 0, 1);
  ASSERT_TRUE(recorder_.Start(blobs_).ok());
  EXPECT_THAT(*recorder_.Stop(), IsEmpty());
}

TEST_F(TouchRecorderTest, StartsAnewEachTime) {
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(recorder_.Start(blobs_).ok());
    recorder_.Note(*blobs_[0], 0, 1);
    EXPECT_THAT(*recorder_.Stop(), SizeIs(1));
  }
}

TEST_F(TouchRecorderTest, RefusesToStartTwiceOrToStopWithoutStart) {
  EXPECT_EQ(recorder_.Stop().status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(recorder_.Start(blobs_).ok());
  EXPECT_EQ(recorder_.Start(blobs_).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(TouchRecorderTest, IgnoresPaddingAndOtherBlobs) {
  ASSERT_TRUE(recorder_.Start({blobs_[0]}).ok());
  recorder_.Note(*blobs_[0], blobs_[0]->size(), 4096);
  recorder_.Note(*blobs_[0], 0, 0);
  recorder_.Note(*blobs_[1], 0, 1);
  recorder_.Note(*blobs_[0], 7 * kFrameSize, UINT64_MAX);
  EXPECT_THAT(Frames(*recorder_.Stop()), ElementsAre(Pair(0, 7)));
}

TEST_F(TouchRecorderTest, ManyReadersMakeOneTouchOfAFrame) {
  ASSERT_TRUE(recorder_.Start(blobs_).ok());
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < 8; ++i) {
      readers.emplace_back([this] {
        for (uint64_t offset = 0; offset < 8 * kFrameSize; offset += 4096) {
          recorder_.Note(*blobs_[0], offset, 4096);
        }
      });
    }
  }
  EXPECT_THAT(*recorder_.Stop(), SizeIs(8));
}

}  // namespace
}  // namespace lamina::chunkstore
