// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/link.h"

#include <gtest/gtest.h>

namespace lamina::registry {
namespace {

TEST(LinkTest, NextAsRegistriesWriteIt) {
  EXPECT_EQ(NextLink(R"(</v2/a/tags/list?n=1&last=x>; rel="next")"), "/v2/a/tags/list?n=1&last=x");
  EXPECT_EQ(NextLink("<https://h/v2/a>;rel=next"), "https://h/v2/a");
  EXPECT_EQ(NextLink(R"(<x> ; title="a, b; rel=no" ; REL = "prev Next")"), "x");
}

TEST(LinkTest, OthersArePassedOver) {
  EXPECT_EQ(NextLink(R"(<a>; rel="prev", <b>; rel="next", <c>; rel="next")"), "b");
  EXPECT_EQ(NextLink(R"(<a,b>; title="\", <x>; rel=next", <c>; rel=next)"), "c");
  for (const char* header : {"", "a", "<a", "<a>", "<a>; rel", "<a>; rel=", "<a>; rel=nexts",
                             "<a>; rel=\"prev", "<a>; title=next", "a; rel=next"}) {
    EXPECT_EQ(NextLink(header), "") << header;
  }
}

}  // namespace
}  // namespace lamina::registry
