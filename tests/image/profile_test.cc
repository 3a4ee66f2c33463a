// SPDX-License-Identifier: Apache-2.0
#include "fs/image/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"
#include "fs/image/oci.h"

namespace lamina::fs {
namespace {

using testing::HasSubstr;

Digest Name(std::string_view text) { return Digest::Of(AsBytes(text)); }

TEST(ProfileTest, ComesBackAsItWasWritten) {
  const Profile profile{.image = Name("image"),
                        .blobs = {{Name("a"), Name("content")}, {Name("b"), std::nullopt}},
                        .touches = {{1, 7, 0}, {0, 0, 5}, {1, 6, 5}}};
  const auto parsed = Profile::Parse(profile.ToJson());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(*parsed == profile);
  EXPECT_EQ(parsed->ToJson(), profile.ToJson());
}

TEST(ProfileTest, LargestOneFitsTheLimitOfDocuments) {
  Profile profile{.image = Name("image")};
  for (size_t i = 0; i < oci::kMaxLayers; ++i) {
    profile.blobs.push_back({Name(std::to_string(i)), Name("content")});
  }
  for (size_t i = 0; i < chunkstore::kMaxTouches; ++i) {
    profile.touches.push_back({static_cast<uint32_t>(oci::kMaxLayers - 1),
                               chunkstore::kMaxFrames - 1 - static_cast<uint32_t>(i),
                               9'999'999'999'999});
  }
  const std::string text = profile.ToJson();
  EXPECT_LE(text.size(), oci::kMaxDocumentSize);
  const auto parsed = Profile::Parse(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(*parsed == profile);
}

TEST(ProfileTest, SaysWhatIsWrong) {
  const std::string blob = "{\"digest\":\"" + Name("a").ToString() + "\"}";
  const auto with = [&](const std::string& touches, const std::string& blobs) {
    return "{\"version\":1,\"blobs\":[" + blobs + "],\"touches\":" + touches + "}";
  };
  const struct {
    std::string text;
    const char* error;
  } cases[] = {
      {"", "profile"},
      {"{}", "version"},
      {R"({"version":2,"blobs":[],"touches":[]})", "version 2"},
      {R"({"version":1,"blobs":[]})", "touches"},
      {with("{}", blob), "not an array"},
      {with("[[0,0]]", blob), "touches[0]: not an array of three numbers"},
      {with("[[0,0,0],[0,-1,0]]", blob), "touches[1]: not an array of three numbers"},
      {with("[[0,0,1.5]]", blob), "three numbers"},
      {with("[[1,0,0]]", blob), "blob 1 of 1"},
      {with("[[0,268435456,0]]", blob), "frame 268435456"},
      {with("[[0,0,18446744073709551615]]", blob), "time"},
      {with("[[0,0,5],[0,1,4]]", blob), "earlier"},
      {with("[[0,3,5],[0,3,6]]", blob), "frame 3 of blob 0 is there twice"},
      {with("[]", blob + "," + blob), "twice"},
      {with("[]", R"({"digest":"md5:00"})"), "blobs[0].digest"},
  };
  for (const auto& c : cases) {
    const auto parsed = Profile::Parse(c.text);
    ASSERT_FALSE(parsed.ok()) << c.text;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(c.error)) << c.text;
  }
}

}  // namespace
}  // namespace lamina::fs
