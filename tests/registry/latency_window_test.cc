// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/latency_window.h"

#include <gtest/gtest.h>

namespace lamina::registry {
namespace {

using std::chrono::milliseconds;

TEST(LatencyWindowTest, LateIsLaterThanMostOfTheRecent) {
  LatencyWindow window;
  EXPECT_EQ(window.Patience(), milliseconds(1000));  // as long as little is known
  for (int i = 1; i <= 100; ++i) window.Add(milliseconds(i * 10));
  EXPECT_EQ(window.Patience(), milliseconds(960));
  for (int i = 0; i < 128; ++i) window.Add(milliseconds(200));
  EXPECT_EQ(window.Patience(), milliseconds(200));
  for (int i = 0; i < 128; ++i) window.Add(milliseconds(1));
  EXPECT_EQ(window.Patience(), milliseconds(50));  // never sooner
}

TEST(LatencyWindowTest, HedgesAreATenthAtMost) {
  LatencyWindow window;
  EXPECT_TRUE(window.TakeHedge());
  EXPECT_FALSE(window.TakeHedge());
  int hedges = 0;
  for (int i = 0; i < 1000; ++i) {
    window.Add(milliseconds(1));
    hedges += window.TakeHedge();
  }
  EXPECT_GE(hedges, 90);
  EXPECT_LE(hedges, 100);
}

}  // namespace
}  // namespace lamina::registry
