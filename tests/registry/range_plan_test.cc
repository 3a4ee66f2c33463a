// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/range_plan.h"

#include <gtest/gtest.h>

#include <string>

namespace lamina::registry {
namespace {

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

class RangePlanTest : public testing::Test {
 protected:
  Ranges Plan(const Ranges& ranges) {
    std::vector<chunkstore::RangeRead> reads;
    for (const auto& [offset, length] : ranges) {
      reads.push_back({offset, std::span(buffer_).first(length)});
    }
    Ranges planned;
    for (const PlannedRequest& request : PlanRequests(reads)) {
      planned.emplace_back(request.offset, request.length);
      for (const chunkstore::RangeRead& part : request.parts) {
        EXPECT_GE(part.offset, request.offset);
        EXPECT_LE(part.offset + part.into.size(), request.offset + request.length);
      }
    }
    return planned;
  }

  std::vector<std::byte> buffer_{3 * kMaxRequest};
};

TEST_F(RangePlanTest, NeighboursBecomeOne) {
  EXPECT_EQ(Plan({{100, 50}, {0, 100}}), (Ranges{{0, 150}}));
  EXPECT_EQ(Plan({{0, 100}, {100 + kMaxGap, 10}}), (Ranges{{0, 110 + kMaxGap}}));
  EXPECT_EQ(Plan({{0, 100}, {101 + kMaxGap, 10}}), (Ranges{{0, 100}, {101 + kMaxGap, 10}}));
}

TEST_F(RangePlanTest, RangesMayOverlap) {
  EXPECT_EQ(Plan({{0, 100}, {50, 20}, {90, 20}}), (Ranges{{0, 110}}));
}

TEST_F(RangePlanTest, LongOnesBecomeSeveral) {
  EXPECT_EQ(Plan({{7, 2 * kMaxRequest + 1}}),
            (Ranges{{7, kMaxRequest}, {7 + kMaxRequest, kMaxRequest}, {7 + 2 * kMaxRequest, 1}}));
}

TEST_F(RangePlanTest, NothingIsAskedForNothing) {
  EXPECT_EQ(Plan({}), Ranges{});
  EXPECT_EQ(Plan({{5, 0}}), Ranges{});
}

}  // namespace
}  // namespace lamina::registry
