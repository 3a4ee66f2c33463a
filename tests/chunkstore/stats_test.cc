// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/stats.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace lamina::chunkstore {
namespace {

using std::chrono::nanoseconds;

TEST(LatencyHistogramTest, HasNoQuantilesWithoutSamples) {
  const LatencyHistogram histogram;
  EXPECT_EQ(histogram.count(), 0u);
  EXPECT_EQ(histogram.Quantile(0.5), nanoseconds(0));
}

TEST(LatencyHistogramTest, BoundsEachValueFromAboveByAQuarterAtMost) {
  for (int64_t value = 1; value < int64_t{1} << 39; value = value * 9 / 8 + 1) {
    LatencyHistogram histogram;
    histogram.Add(nanoseconds(value));
    const int64_t bound = histogram.Quantile(1).count();
    EXPECT_GE(bound, value);
    EXPECT_LE(bound, value + value / 4 + 1);
  }
}

TEST(LatencyHistogramTest, FindsQuantiles) {
  LatencyHistogram histogram;
  for (int i = 1; i <= 1000; ++i) histogram.Add(std::chrono::microseconds(i));
  EXPECT_EQ(histogram.count(), 1000u);
  EXPECT_NEAR(histogram.Quantile(0.5).count(), 500e3, 125e3);
  EXPECT_NEAR(histogram.Quantile(0.99).count(), 990e3, 250e3);
  EXPECT_GE(histogram.Quantile(1), std::chrono::microseconds(1000));
  EXPECT_LE(histogram.Quantile(0), nanoseconds(1250));
}

TEST(LatencyHistogramTest, TakesValuesOutsideItsRange) {
  LatencyHistogram histogram;
  histogram.Add(nanoseconds(-5));
  EXPECT_EQ(histogram.Quantile(1), nanoseconds(0));
  histogram.Add(std::chrono::hours(24));
  EXPECT_GE(histogram.Quantile(1), std::chrono::minutes(15));
  EXPECT_EQ(histogram.count(), 2u);
}

TEST(LatencyHistogramTest, LosesNothingWhenThreadsAddAtOnce) {
  LatencyHistogram histogram;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&histogram] {
      for (int k = 0; k < 10'000; ++k) histogram.Add(nanoseconds(k));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(histogram.count(), 40'000u);
}

TEST(LatencyHistogramTest, CountsWhatIsBelowABound) {
  LatencyHistogram histogram;
  for (const int value : {10, 100, 1'000, 10'000}) histogram.Add(nanoseconds(value));
  EXPECT_EQ(histogram.CountUpTo(nanoseconds(0)), 0u);
  EXPECT_EQ(histogram.CountUpTo(nanoseconds(200)), 2u);
  EXPECT_EQ(histogram.CountUpTo(nanoseconds(1'000'000)), 4u);
  EXPECT_EQ(histogram.sum(), nanoseconds(11'110));
}

TEST(ReadStatsTest, SumsHaveEverything) {
  ReadStats one;
  one.read_requests = 1;
  one.read_bytes = 2;
  one.missed_requests = 3;
  one.failed_requests = 4;
  one.errors[5] = 5;
  one.waiting_requests = 6;
  one.origin_requests = 7;
  one.fetched_bytes = 8;
  one.fetched_frames = 9;
  one.copied_frames = 10;
  one.decompressed_bytes = 11;
  one.written_bytes = 12;
  one.hit_latency.Add(nanoseconds(13));
  one.miss_latency.Add(nanoseconds(14));
  ReadStats sum;
  one.AddTo(sum);
  one.AddTo(sum);
  EXPECT_EQ(sum.read_requests, 2u);
  EXPECT_EQ(sum.read_bytes, 4u);
  EXPECT_EQ(sum.missed_requests, 6u);
  EXPECT_EQ(sum.failed_requests, 8u);
  EXPECT_EQ(sum.errors[5], 10u);
  EXPECT_EQ(sum.waiting_requests, 12u);
  EXPECT_EQ(sum.origin_requests, 14u);
  EXPECT_EQ(sum.fetched_bytes, 16u);
  EXPECT_EQ(sum.fetched_frames, 18u);
  EXPECT_EQ(sum.copied_frames, 20u);
  EXPECT_EQ(sum.decompressed_bytes, 22u);
  EXPECT_EQ(sum.written_bytes, 24u);
  EXPECT_EQ(sum.hit_latency.sum(), nanoseconds(26));
  EXPECT_EQ(sum.miss_latency.count(), 2u);
}

}  // namespace
}  // namespace lamina::chunkstore
