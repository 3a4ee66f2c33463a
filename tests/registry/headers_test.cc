// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "chunkstore/http/client.h"

namespace lamina::http {
namespace {

using std::chrono::seconds;

TEST(HeadersTest, RetryAfterIsSecondsOrADate) {
  const auto now =
      std::chrono::system_clock::from_time_t(1'700'000'000);  // Tue 14 Nov 2023 22:13:20
  EXPECT_EQ(ParseRetryAfter("0", now), seconds(0));
  EXPECT_EQ(ParseRetryAfter("120", now), seconds(120));
  EXPECT_EQ(ParseRetryAfter("Tue, 14 Nov 2023 22:13:50 GMT", now), seconds(30));
  EXPECT_EQ(ParseRetryAfter("Tue, 14 Nov 2023 22:13:00 GMT", now), seconds(0));
  for (const char* text : {"", "soon", "-1", "1.5", "99999999999999999999"}) {
    EXPECT_EQ(ParseRetryAfter(text, now), std::nullopt) << text;
  }
}

TEST(HeadersTest, ContentRange) {
  const auto range = ParseContentRange("bytes 0-99/1234");
  ASSERT_TRUE(range);
  EXPECT_EQ(range->first, 0u);
  EXPECT_EQ(range->last, 99u);
  EXPECT_EQ(range->size, 1234u);
  EXPECT_EQ(ParseContentRange("bytes 5-5/*")->size, std::nullopt);
  for (const char* text :
       {"", "bytes", "bytes */1234", "bytes 9-0/10", "bytes 0-10/10", "items 0-1/2", "bytes 0-1",
        "bytes 0-1/", "bytes 0-1/2x", "bytes -1-2/3", "bytes 0-99999999999999999999/*"}) {
    EXPECT_FALSE(ParseContentRange(text)) << text;
  }
}

}  // namespace
}  // namespace lamina::http
