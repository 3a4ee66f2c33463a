// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/readahead.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace lamina::chunkstore {
namespace {

// Reads frames one at a time and reports those that a blob would report: those that are missing and
// the first of each range that was fetched ahead.
class Reader {
 public:
  void Read(uint32_t frame) {
    ++used_;
    const bool there = fetched_.contains(frame);
    if (there && !triggers_.contains(frame)) return;
    misses_ += there ? 0 : 1;
    fetched_.insert(frame);
    const Readahead::Range range = readahead_.Advance(frame, frame + 1);
    if (range.first < range.end) triggers_.insert(range.first);
    for (uint32_t i = range.first; i < range.end; ++i) fetched_.insert(i);
  }

  size_t used() const { return used_; }
  size_t fetched() const { return fetched_.size(); }
  int misses() const { return misses_; }

 private:
  Readahead readahead_;
  std::set<uint32_t> fetched_;
  std::set<uint32_t> triggers_;
  size_t used_ = 0;
  int misses_ = 0;
};

TEST(ReadaheadTest, SequentialReaderMissesAtTheBeginningOnly) {
  Reader reader;
  for (uint32_t frame = 100; frame < 1100; ++frame) reader.Read(frame);
  EXPECT_EQ(reader.misses(), 3);
  EXPECT_LE(reader.fetched(), 1000 + 2 * Readahead::kMaxWindow);
}

TEST(ReadaheadTest, RandomReaderGetsNothing) {
  Reader reader;
  std::mt19937 random(1);
  std::set<uint32_t> frames;
  while (frames.size() < 500) frames.insert(random() % 1'000'000 * 10);
  std::vector<uint32_t> shuffled(frames.begin(), frames.end());
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  for (const uint32_t frame : shuffled) reader.Read(frame);
  EXPECT_EQ(reader.fetched(), 500u);
}

TEST(ReadaheadTest, ReaderThatStopsCostsNoMoreThanItUsed) {
  for (uint32_t length = 1; length < 100; ++length) {
    Reader reader;
    for (uint32_t frame = 0; frame < length; ++frame) reader.Read(frame);
    EXPECT_LE(reader.fetched(), 2 * reader.used()) << length;
  }
}

TEST(ReadaheadTest, FollowsSeveralReaders) {
  Reader reader;
  for (uint32_t i = 0; i < 300; ++i) {
    for (uint32_t k = 0; k < 4; ++k) reader.Read(k * 10'000 + i);
  }
  EXPECT_EQ(reader.misses(), 4 * 3);
}

TEST(ReadaheadTest, FirstRequestIsNotSequentialHoweverLong) {
  Readahead readahead;
  const Readahead::Range range = readahead.Advance(10, 30);
  EXPECT_EQ(range.first, range.end);
}

TEST(ReadaheadTest, ForgivesSwappedRequests) {
  Readahead readahead;
  readahead.Advance(0, 1);
  readahead.Advance(2, 3);
  readahead.Advance(1, 2);
  const Readahead::Range range = readahead.Advance(3, 4);
  EXPECT_EQ(range.first, 4u);
  EXPECT_GT(range.end, range.first);
}

TEST(ReadaheadTest, ASmallerWindowStaysCloseToTheReader) {
  Readahead readahead;
  for (uint32_t frame = 0; frame < 100; ++frame) {
    EXPECT_EQ(readahead.Advance(frame, frame + 1, 0).end, 0u);
  }
  for (uint32_t frame = 100; frame < 200; ++frame) {
    EXPECT_LE(readahead.Advance(frame, frame + 1, 2).end, frame + 5);
  }
}

}  // namespace
}  // namespace lamina::chunkstore
