// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/chunkstore/store_testing.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::kFrameSize;
using chunkstore::TestBlob;
using chunkstore::Touch;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

// Two blobs of 100 full frames that do not compress.
class PlanTest : public chunkstore::StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    store_ = OpenStore();
    for (uint64_t seed : {1, 2}) {
      const TestBlob blob = AddBlob({chunkstore::RandomBytes(100 * kFrameSize, seed)});
      blobs_.push_back(store_->Attach(blob.descriptor(), NewOrigin()).value());
      profile_.blobs.push_back({blob.info.digest, std::nullopt});
    }
  }
  static std::vector<Touch> Touches(const std::vector<std::pair<uint32_t, uint32_t>>& frames) {
    std::vector<Touch> touches;
    for (const auto& [blob, frame] : frames) touches.push_back({blob, frame, touches.size()});
    return touches;
  }

  std::unique_ptr<chunkstore::BlobStore> store_;
  std::vector<std::shared_ptr<Blob>> blobs_;
  Profile profile_;
};

TEST_F(PlanTest, JoinsNeighboursAndKeepsTheOrderOfTheFirstTouch) {
  const auto touches = Touches({{1, 50}, {0, 7}, {0, 5}, {1, 51}, {0, 6}, {1, 9}});
  EXPECT_THAT(PlanFor(touches, blobs_, 0),
              ElementsAre(FrameSpan{1, 50, 52}, FrameSpan{0, 5, 8}, FrameSpan{1, 9, 10}));
}

TEST_F(PlanTest, FetchesSmallGapsAsWell) {
  const auto touches = Touches({{0, 1}, {0, 3}, {0, 9}});
  EXPECT_THAT(PlanFor(touches, blobs_, 300 << 10),
              ElementsAre(FrameSpan{0, 1, 4}, FrameSpan{0, 9, 10}));
  EXPECT_THAT(PlanFor(touches, blobs_, 0), SizeIs(3));
}

TEST_F(PlanTest, DoesNotMoveWhatIsWantedLateToTheFront) {
  std::vector<std::pair<uint32_t, uint32_t>> frames;
  for (uint32_t i = 0; i < 80; ++i) frames.emplace_back(0, i);
  frames.emplace_back(1, 3);
  for (uint32_t i = 80; i < 90; ++i) frames.emplace_back(0, i);
  const std::vector<FrameSpan> plan = PlanFor(Touches(frames), blobs_, 0);
  ASSERT_THAT(plan, SizeIs(3));
  EXPECT_EQ(plan[0].first, 0u);
  EXPECT_LT(plan[0].end, 80u);
  EXPECT_EQ(plan[1].blob, 0u);
  EXPECT_EQ(plan[2].blob, 1u);
}

TEST_F(PlanTest, ProfileOfOtherBlobsIsOfNoUse) {
  profile_.touches = Touches({{0, 1}, {1, 2}});
  EXPECT_THAT(TouchesIn(profile_, {blobs_[1]}), ElementsAre(Touch{0, 2, 1}));
  EXPECT_THAT(TouchesIn(profile_, {}), IsEmpty());
}

TEST_F(PlanTest, FramesPastTheEndAreLeftOut) {
  profile_.touches = Touches({{0, 100}, {0, 99}, {0, UINT32_MAX}});
  EXPECT_THAT(TouchesIn(profile_, blobs_), ElementsAre(Touch{0, 99, 1}));
}

TEST_F(PlanTest, PackHasTheFramesOneBehindTheOther) {
  profile_.touches = Touches({{1, 5}, {0, 0}});
  const uint64_t first = blobs_[1]->frames()[5].length;
  const uint64_t second = blobs_[0]->frames()[0].length;
  const auto frames = LayOutPack(profile_, blobs_, first + second);
  ASSERT_TRUE(frames.ok()) << frames.status();
  ASSERT_THAT(*frames, SizeIs(2));
  EXPECT_EQ((*frames)[0].offset, 0u);
  EXPECT_EQ((*frames)[1].offset, first);
  EXPECT_EQ((*frames)[1].blob, 0u);
}

TEST_F(PlanTest, PackThatCannotBeTheProfilesIsRefused) {
  profile_.touches = Touches({{1, 5}});
  const uint64_t size = blobs_[1]->frames()[5].length;
  EXPECT_THAT(std::string(LayOutPack(profile_, blobs_, size + 1).status().message()),
              HasSubstr("bytes"));
  EXPECT_TRUE(absl::IsDataLoss(LayOutPack(profile_, {blobs_[0]}, size).status()));
  profile_.touches = Touches({{1, 100}});
  EXPECT_TRUE(absl::IsDataLoss(LayOutPack(profile_, blobs_, size).status()));
}

}  // namespace
}  // namespace lamina::fs
