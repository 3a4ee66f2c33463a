// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/challenge.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace lamina::registry {
namespace {

TEST(ChallengeTest, BearerAsRegistriesWriteIt) {
  const auto challenges = ParseChallenges(
      R"(Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull,push")");
  ASSERT_EQ(challenges.size(), 1u);
  EXPECT_EQ(challenges[0].scheme, "bearer");
  EXPECT_EQ(challenges[0].Parameter("realm"), "https://auth.example/token");
  EXPECT_EQ(challenges[0].Parameter("service"), "registry.example");
  EXPECT_EQ(challenges[0].Parameter("scope"), "repository:a/b:pull,push");
  EXPECT_EQ(challenges[0].Parameter("error"), "");
}

TEST(ChallengeTest, SeveralInOneHeader) {
  const auto challenges =
      ParseChallenges(R"(Negotiate, BASIC Realm=plain , charset = "UTF-8",Bearer realm="x\"y\\z")");
  ASSERT_EQ(challenges.size(), 3u);
  EXPECT_EQ(challenges[0].scheme, "negotiate");
  EXPECT_EQ(challenges[1].scheme, "basic");
  EXPECT_EQ(challenges[1].Parameter("realm"), "plain");
  EXPECT_EQ(challenges[1].Parameter("charset"), "UTF-8");
  EXPECT_EQ(challenges[2].Parameter("realm"), "x\"y\\z");
}

TEST(ChallengeTest, SomeSchemesHaveATokenInPlaceOfParameters) {
  for (const char* token : {"abc==", "abc", "YWJj/+=", "abc== "}) {
    const auto challenges =
        ParseChallenges(fmt::format(R"(Negotiate {}, Bearer realm="u", scope=s)", token));
    ASSERT_EQ(challenges.size(), 2u) << token;
    EXPECT_EQ(challenges[1].scheme, "bearer");
    EXPECT_EQ(challenges[1].Parameter("realm"), "u");
    EXPECT_EQ(challenges[1].Parameter("scope"), "s");
  }
}

TEST(ChallengeTest, BearerIsUsableIfItHasARealm) {
  const auto usable = [](std::string_view header) -> std::string {
    const std::vector<Challenge> challenges = ParseChallenges(header);
    const Challenge* found = FindUsable(challenges);
    return found == nullptr ? "none" : found->scheme + " " + found->Parameter("realm");
  };
  EXPECT_EQ(usable(R"(Bearer error="invalid_token", Bearer realm="u")"), "bearer u");
  EXPECT_EQ(usable(R"(Basic realm="b", Bearer realm="u")"), "bearer u");
  EXPECT_EQ(usable(R"(Bearer error="invalid_token", Basic realm="b")"), "basic b");
  EXPECT_EQ(usable("Basic"), "basic ");
  EXPECT_EQ(usable("Bearer, Negotiate"), "none");
}

TEST(ChallengeTest, MalformedEndsTheList) {
  EXPECT_TRUE(ParseChallenges("").empty());
  EXPECT_TRUE(ParseChallenges("realm=\"x\"").empty());
  EXPECT_TRUE(ParseChallenges("\"Bearer\"").empty());
  EXPECT_EQ(ParseChallenges("Basic realm=\"open").size(), 1u);
  EXPECT_EQ(ParseChallenges("Basic realm=\"open\\").size(), 1u);
  EXPECT_EQ(ParseChallenges("Basic realm=\"a\" \x01").size(), 1u);
}

}  // namespace
}  // namespace lamina::registry
