// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "chunkstore/registry/token_source.h"

namespace lamina::registry {
namespace {

using std::chrono::seconds;

TEST(TokenAnswerTest, BothNamesOfTheToken) {
  EXPECT_EQ(ParseTokenAnswer(R"({"token": "a", "access_token": "b"})")->token, "a");
  EXPECT_EQ(ParseTokenAnswer(R"({"access_token": "b", "expires_in": 300})")->token, "b");
}

TEST(TokenAnswerTest, LifetimeHasADefaultAndALimit) {
  EXPECT_EQ(ParseTokenAnswer(R"({"token": "a"})")->lifetime, seconds(60));
  EXPECT_EQ(ParseTokenAnswer(R"({"token": "a", "expires_in": 300})")->lifetime, seconds(300));
  EXPECT_EQ(ParseTokenAnswer(R"({"token": "a", "expires_in": 9000000000000000000})")->lifetime,
            std::chrono::hours(24));
  EXPECT_FALSE(ParseTokenAnswer(R"({"token": "a", "expires_in": -1})").ok());
}

TEST(TokenAnswerTest, WhatCannotBeAHeaderIsRefusedAndNotRepeated) {
  for (const char* text : {"", "{}", "[]", R"({"token": ""})", R"({"token": "a\r\nX: y"})",
                           R"({"token": "s3cret word"})", R"({"token": "s3cret")"}) {
    const auto answer = ParseTokenAnswer(text);
    EXPECT_FALSE(answer.ok()) << text;
    EXPECT_EQ(answer.status().ToString().find("s3cret"), std::string::npos);
  }
}

}  // namespace
}  // namespace lamina::registry
