// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/digest.h"

#include <absl/hash/hash.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "chunkstore/base/file.h"

namespace lamina {
namespace {

using ::testing::HasSubstr;

// FIPS 180-4 examples, as published by NIST.
constexpr char kOfNothing[] =
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
constexpr char kOfAbc[] = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr char kOfMillionAs[] =
    "sha256:cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";

TEST(Digest, IsSha256) {
  EXPECT_EQ(Digest::Of({}).ToString(), kOfNothing);
  EXPECT_EQ(Digest::Of(AsBytes("abc")).ToString(), kOfAbc);
  EXPECT_EQ(Digest::Of(AsBytes(std::string(1000000, 'a'))).ToString(), kOfMillionAs);
}

TEST(Digest, ParsesWhatItPrints) {
  const Digest digest = Digest::Of(AsBytes("abc"));
  const absl::StatusOr<Digest> parsed = Digest::Parse(digest.ToString());
  ASSERT_EQ(parsed.status(), absl::OkStatus());
  EXPECT_EQ(*parsed, digest);
  EXPECT_EQ("sha256:" + digest.Hex(), digest.ToString());
}

TEST(Digest, RefusesEveryOtherForm) {
  const std::string hex(64, 'a');
  for (const std::string& text :
       {std::string(), std::string("sha256:"), hex, "sha512:" + hex, "SHA256:" + hex,
        "sha256:" + hex.substr(1), "sha256:" + hex + "a", " sha256:" + hex,
        "sha256:" + hex.substr(1) + "A", "sha256:" + hex.substr(1) + "g",
        "sha256:" + hex.substr(1) + "/", "sha256:../" + hex.substr(3)}) {
    EXPECT_EQ(Digest::Parse(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(Digest, ErrorQuotesOnlyTheStartOfALongText) {
  const absl::Status status = Digest::Parse(std::string(100000, 'x')).status();
  EXPECT_LT(status.message().size(), 200);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is not a digest"));
}

TEST(Hasher, PiecesGiveTheDigestOfTheWhole) {
  Hasher hasher;
  hasher.Update(AsBytes("a"));
  hasher.Update({});
  hasher.Update(AsBytes("bc"));
  EXPECT_EQ(hasher.Finish().ToString(), kOfAbc);
}

TEST(Hasher, StartsAnewAfterFinish) {
  Hasher hasher;
  hasher.Update(AsBytes("something else"));
  hasher.Finish();
  EXPECT_EQ(hasher.Finish().ToString(), kOfNothing);
  hasher.Update(AsBytes("abc"));
  EXPECT_EQ(hasher.Finish().ToString(), kOfAbc);
}

TEST(Hasher, KeepsItsStateWhenMoved) {
  Hasher first;
  first.Update(AsBytes("ab"));
  Hasher second = std::move(first);
  second.Update(AsBytes("c"));
  EXPECT_EQ(second.Finish().ToString(), kOfAbc);
}

TEST(Hasher, ThreadsMayHashAtOnce) {
  std::vector<std::thread> threads;
  std::vector<Digest> digests(4);
  for (Digest& digest : digests) {
    threads.emplace_back([&digest] {
      for (int i = 0; i < 1000; ++i) digest = Digest::Of(AsBytes("abc"));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Digest& digest : digests) EXPECT_EQ(digest.ToString(), kOfAbc);
}

TEST(Digest, IsAKeyOfHashTables) {
  std::unordered_set<Digest, absl::Hash<Digest>> set;
  set.insert(Digest::Of(AsBytes("a")));
  set.insert(Digest::Of(AsBytes("b")));
  set.insert(Digest::Of(AsBytes("a")));
  EXPECT_EQ(set.size(), 2);
}

}  // namespace
}  // namespace lamina
