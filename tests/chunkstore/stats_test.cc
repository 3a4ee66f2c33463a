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

}  // namespace
}  // namespace lamina::chunkstore
