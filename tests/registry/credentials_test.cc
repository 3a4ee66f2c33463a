// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/credentials.h"

#include <gtest/gtest.h>

#include "chunkstore/base/file.h"

namespace lamina::registry {
namespace {

// What an auth file says: "user:password", "helper NAME", "nothing", or an error.
std::string Find(std::string_view json, std::string_view host,
                 std::string_view repository = "a/b") {
  const auto entry = FindInAuthFile(json, "auth.json", host, repository);
  if (!entry.ok()) return "error: " + entry.status().ToString();
  if (!entry->helper.empty()) return "helper " + entry->helper;
  if (!entry->credential) return "nothing";
  if (!entry->credential->identity_token.empty())
    return "token " + entry->credential->identity_token;
  return entry->credential->username + ":" + entry->credential->password;
}

TEST(CredentialsTest, ClosestEntryCounts) {
  constexpr std::string_view kFile = R"({"auths": {
    "h.x": {"auth": "aG9zdDpwdw=="},
    "h.x/a": {"auth": "YTpwdw=="},
    "h.x/a/b": {"auth": "YWI6cHc="},
    "other": {}}})";
  EXPECT_EQ(Find(kFile, "h.x", "a/b"), "ab:pw");
  EXPECT_EQ(Find(kFile, "h.x", "a/bb"), "a:pw");
  EXPECT_EQ(Find(kFile, "h.x", "aa"), "host:pw");
  EXPECT_EQ(Find(kFile, "h.x:443", "a"), "nothing");
  EXPECT_EQ(Find(kFile, "other"), "nothing");
}

TEST(CredentialsTest, KeysAsDockerWritesThem) {
  for (const char* key : {"h.x", "https://h.x", "http://h.x/v1/", "https://h.x/v2/", "h.x/v1"}) {
    EXPECT_EQ(Find(fmt::format(R"({{"auths": {{"{}": {{"auth": "dTpw"}}}}}})", key), "h.x"), "u:p")
        << key;
  }
  EXPECT_EQ(Find(R"({"auths": {"https://index.docker.io/v1/": {"auth": "dTpw"}}})", "docker.io"),
            "u:p");
  EXPECT_EQ(Find(R"({"auths": {"https://h.x.evil/v1/": {"auth": "dTpw"}}})", "h.x"), "nothing");
}

TEST(CredentialsTest, FormsOfAnEntry) {
  EXPECT_EQ(Find(R"({"auths": {"h": {"username": "u", "password": "p"}}})", "h"), "u:p");
  EXPECT_EQ(Find(R"({"auths": {"h": {"auth": "dTpwOnE="}}})", "h"), "u:p:q");
  EXPECT_EQ(Find(R"({"auths": {"h": {"auth": "dTo=", "identitytoken": "t"}}})", "h"), "token t");
  EXPECT_NE(Find(R"({"auths": {"h": {"auth": "!"}}})", "h").find("auths.h"), std::string::npos);
  EXPECT_NE(Find(R"({"auths": {"h": {"auth": 1}}})", "h").find("not a string"), std::string::npos);
}

TEST(CredentialsTest, HelpersAreNamed) {
  constexpr std::string_view kFile =
      R"({"auths": {"k": {"auth": "dTpw"}}, "credHelpers": {"h": "one"}, "credsStore": "all"})";
  EXPECT_EQ(Find(kFile, "h"), "helper one");
  EXPECT_EQ(Find(kFile, "k"), "u:p");
  EXPECT_EQ(Find(kFile, "other"), "helper all");
}

TEST(CredentialsTest, GivenOnesComeFirst) {
  CredentialSources sources;
  sources.given = {{"", {"any", "p", ""}}, {"h", {"exact", "p", ""}}};
  EXPECT_EQ((*FindCredential(sources, "h", "a"))->username, "exact");
  EXPECT_EQ((*FindCredential(sources, "other", "a"))->username, "any");
}

TEST(CredentialsTest, FilesInOrderAndMissingOnesPassedOver) {
  const auto directory = TemporaryDirectory::Create(testing::TempDir(), "lamina-auth-");
  ASSERT_TRUE(directory.ok());
  const std::string first = directory->path() + "/first";
  const std::string second = directory->path() + "/second";
  ASSERT_TRUE(WriteFileAtomically(first, R"({"auths": {"g": {"auth": "Zzpw"}}})").ok());
  ASSERT_TRUE(WriteFileAtomically(second, R"({"auths": {"h": {"auth": "aDpw"}}})").ok());
  const CredentialSources sources{.files = {directory->path() + "/none", first, second}};
  EXPECT_EQ((*FindCredential(sources, "g", "a"))->username, "g");
  EXPECT_EQ((*FindCredential(sources, "h", "a"))->username, "h");
  EXPECT_FALSE((*FindCredential(sources, "i", "a")).has_value());
  ASSERT_TRUE(WriteFileAtomically(first, "{").ok());
  const auto damaged = FindCredential(sources, "h", "a");
  EXPECT_NE(damaged.status().ToString().find(first), std::string::npos) << damaged.status();
}

TEST(CredentialsTest, TextIsUserAndPassword) {
  EXPECT_EQ(Credential::Parse("u:p:q")->password, "p:q");
  EXPECT_EQ(Credential::Parse("u:")->password, "");
  for (const char* text : {"", "secret", ":secret"}) {
    const auto credential = Credential::Parse(text);
    EXPECT_FALSE(credential.ok());
    EXPECT_EQ(credential.status().ToString().find("secret"), std::string::npos);
  }
  EXPECT_EQ(Credential::Parse("Aladdin:open sesame")->Basic(),
            "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
}

TEST(CredentialsTest, HelperNamesCannotLeadElsewhere) {
  const auto directory = TemporaryDirectory::Create(testing::TempDir(), "lamina-auth-");
  ASSERT_TRUE(directory.ok());
  const std::string file = directory->path() + "/file";
  for (const char* name : {"../../bin/sh", "x/y", "none-of-that-name"}) {
    ASSERT_TRUE(WriteFileAtomically(file, fmt::format(R"({{"credsStore": "{}"}})", name)).ok());
    EXPECT_FALSE(FindCredential({.files = {file}}, "h", "a").ok()) << name;
  }
}

}  // namespace
}  // namespace lamina::registry
