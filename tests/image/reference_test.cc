// SPDX-License-Identifier: Apache-2.0
#include "fs/image/reference.h"

#include <gtest/gtest.h>

#include "fs/image/image_store.h"

namespace lamina::fs {
namespace {

TEST(ReferenceTest, FirstColonEndsThePath) {
  const auto plain = ImageReference::Parse("oci:/srv/images");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->path, "/srv/images");
  EXPECT_EQ(plain->name, "");

  const auto tagged = ImageReference::Parse("oci:/srv/images:debian:12");
  ASSERT_TRUE(tagged.ok()) << tagged.status();
  EXPECT_EQ(tagged->path, "/srv/images");
  EXPECT_EQ(tagged->name, "debian:12");

  const auto archive = ImageReference::Parse("docker-archive:a.tar:host/debian:12");
  ASSERT_TRUE(archive.ok()) << archive.status();
  EXPECT_EQ(archive->transport, ImageTransport::kDockerArchive);
  EXPECT_EQ(archive->path, "a.tar");
  EXPECT_EQ(archive->name, "host/debian:12");
}

TEST(ReferenceTest, DirectoryKeepsItsColons) {
  const auto directory = ImageReference::Parse("dir:/srv/a:b");
  ASSERT_TRUE(directory.ok()) << directory.status();
  EXPECT_EQ(directory->path, "/srv/a:b");
  EXPECT_EQ(directory->name, "");
}

TEST(ReferenceTest, TagFollowsTheGrammarOfImageSpec) {
  for (const char* tag : {"a", "v1.2", "a--b", "a/b", "debian:12", "x@y+z", "A_1"}) {
    EXPECT_TRUE(ImageReference::Parse(fmt::format("oci:d:{}", tag)).ok()) << tag;
  }
  for (const char* tag :
       {"", "-a", "a-", "a..b", "a---b", "a b", "/a", "a/", "a//b", "a-/b", "é"}) {
    EXPECT_FALSE(ImageReference::Parse(fmt::format("oci:d:{}", tag)).ok()) << tag;
  }
}

TEST(ReferenceTest, RefusesWhatIsNotAReference) {
  for (const char* text : {"", "oci", "oci:", "oci::tag", "docker://debian", "/srv/images"}) {
    EXPECT_FALSE(ImageReference::Parse(text).ok()) << text;
  }
  EXPECT_FALSE(ImageReference::ParseConverted("dir:/srv").ok());
}

TEST(ReferenceTest, CredentialsWithoutAHostAreForOneRegistry) {
  registry::Settings settings;
  const auto check = [&](const std::vector<std::string>& references) {
    return CheckCredentials(references, settings);
  };
  const std::vector<std::string> two = {"docker://corp.example/app", "oci:d",
                                        "docker://evil.example/x"};
  const std::vector<std::string> one = {"docker://corp.example/app", "oci:d",
                                        "docker://corp.example/x"};
  EXPECT_TRUE(check(two).ok());
  settings.credentials.given = {{.host = "corp.example", .credential = {.username = "ann"}}};
  EXPECT_TRUE(check(two).ok());
  settings.credentials.given.push_back({.credential = {.username = "ann"}});
  EXPECT_TRUE(check(one).ok());
  const absl::Status status = check(two);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("corp.example and evil.example"), std::string::npos) << status;
}

}  // namespace
}  // namespace lamina::fs
