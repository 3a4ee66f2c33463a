// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/cache_options.h"

#include <gtest/gtest.h>

namespace lamina::fs {
namespace {

TEST(CacheOptionsTest, AmountsAreBytesOrShares) {
  EXPECT_EQ(ParseAmount("0").value(), Amount{.bytes = 0});
  EXPECT_EQ(ParseAmount("1000").value(), Amount{.bytes = 1000});
  EXPECT_EQ(ParseAmount("512K").value(), Amount{.bytes = 512 << 10});
  EXPECT_EQ(ParseAmount("20G").value(), Amount{.bytes = 20ULL << 30});
  EXPECT_EQ(ParseAmount("1.5T").value(), Amount{.bytes = 3ULL << 39});
  EXPECT_EQ(ParseAmount("30%").value(), Amount{.percent = 30});
  EXPECT_EQ(ParseAmount("30%")->Of(1000), 300u);
  EXPECT_EQ(ParseAmount("7K")->Of(1000), 7168u);
}

TEST(CacheOptionsTest, OtherTextsAreRefused) {
  for (const char* text : {"", "K", "-1", "1 G", "1GB", "1g", "0x10", "1e3", "nan", "inf", "0%",
                           "101%", "1.5%", "5000000000T", "%", "1%%"}) {
    EXPECT_EQ(ParseAmount(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(CacheOptionsTest, SharesAreOfTheFileSystem) {
  const auto limits = LimitsFor({.size = {.percent = 50}, .free = {.bytes = 123}}, "/");
  ASSERT_TRUE(limits.ok()) << limits.status();
  const auto whole = LimitsFor({.size = {.percent = 100}}, "/");
  EXPECT_NEAR(static_cast<double>(limits->max_bytes) * 2, static_cast<double>(whole->max_bytes),
              1000);
  EXPECT_EQ(limits->min_free, 123u);
  EXPECT_EQ(LimitsFor({}, "/nowhere").status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(LimitsFor({.none = true}, "/")->bounded());
}

}  // namespace
}  // namespace lamina::fs
