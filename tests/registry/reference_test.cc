// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/reference.h"

#include <gtest/gtest.h>

namespace lamina::registry {
namespace {

const std::string kDigest = "sha256:" + std::string(64, 'a');

TEST(RegistryReferenceTest, PartsAreTakenApart) {
  const auto full = Reference::Parse("registry.example:5000/team/app:v1.2@" + kDigest);
  ASSERT_TRUE(full.ok()) << full.status();
  EXPECT_EQ(full->host, "registry.example:5000");
  EXPECT_EQ(full->repository, "team/app");
  EXPECT_EQ(full->tag, "v1.2");
  EXPECT_EQ(full->digest->ToString(), kDigest);
  EXPECT_EQ(full->TagOrDigest(), kDigest);
  EXPECT_EQ(full->ToString(), "registry.example:5000/team/app:v1.2@" + kDigest);
}

TEST(RegistryReferenceTest, LatestIsTheTagOfThoseWithoutOne) {
  EXPECT_EQ(Reference::Parse("localhost/app")->tag, "latest");
  EXPECT_EQ(Reference::Parse("localhost/app@" + kDigest)->tag, "");
}

TEST(RegistryReferenceTest, ImagesOfDockerHubWithOnePartAreInLibrary) {
  EXPECT_EQ(Reference::Parse("docker.io/debian:12")->repository, "library/debian");
  EXPECT_EQ(Reference::Parse("docker.io/team/app")->repository, "team/app");
  EXPECT_EQ(Reference::Parse("other.io/debian")->repository, "debian");
}

TEST(RegistryReferenceTest, AddressesAreHostsToo) {
  EXPECT_EQ(Reference::Parse("127.0.0.1:5000/a")->host, "127.0.0.1:5000");
  EXPECT_EQ(Reference::Parse("[::1]:5000/a:b")->host, "[::1]:5000");
  EXPECT_EQ(Reference::Parse("LocalHost/a")->host, "LocalHost");
  EXPECT_EQ(Reference::Parse("[fe80::1]/a")->host, "[fe80::1]");
}

TEST(RegistryReferenceTest, GrammarOfTheSpecification) {
  for (const char* text : {"h.x/a", "h.x/a.b_c__d-e--f/0", "h.x/a:_T.-", "h-1.x:1/a", "H.x/a"}) {
    EXPECT_TRUE(Reference::Parse(text).ok()) << text << Reference::Parse(text).status();
  }
  for (const char* text :
       {"",        "/",           "debian",          "debian:12",    "team/app", "h.x",
        "h.x/",    "h.x//a",      "h.x/a/",          "h.x/A",        "h.x/a..b", "h.x/a___b",
        "h.x/-a",  "h.x/a-",      "h.x/a:",          "h.x/a:-b",     "h.x/a:.b", "h.x/a b",
        "h.x:0/a", "h.x:65536/a", "h.x:/a",          "h.x:x/a",      "-h.x/a",   "h-.x/a",
        "h..x/a",  "u@h.x/a",     "h.x/a@sha256:12", "h.x/a@md5:00", "h.x/../a", "h.x/a%2fb",
        "h.x/a?b", "[::1/a",      "::1/a",           "h.x/a\n"}) {
    EXPECT_FALSE(Reference::Parse(text).ok()) << text;
  }
  EXPECT_TRUE(Reference::Parse("h.x/a:" + std::string(128, 't')).ok());
  EXPECT_FALSE(Reference::Parse("h.x/a:" + std::string(129, 't')).ok());
  EXPECT_FALSE(Reference::Parse("h.x/" + std::string(260, 'a')).ok());
}

TEST(RegistryReferenceTest, ErrorSaysWhereDockerHubIs) {
  EXPECT_NE(Reference::Parse("debian:12").status().ToString().find("docker.io/library/"),
            std::string::npos);
}

}  // namespace
}  // namespace lamina::registry
