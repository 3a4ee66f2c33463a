// SPDX-License-Identifier: Apache-2.0
#include "fs/image/commit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
namespace stdfs = std::filesystem;

class CommitTest : public ::testing::Test {
 protected:
  void SetUp() override {
    WriteLayout(directory_.path() + "/source", "app",
                {PlainLayer({{"a", Noise(100'000, 1)}}), PlainLayer({{"b", "b"}})});
    MustConvert("oci:" + directory_.path() + "/source:app", base_ref_);
    WriteFile(upper_ + "/new", "new content");
    WriteFile(upper_ + "/sub/file", Noise(300'000, 2));
  }

  CommitOptions Options(const std::string& destination) const {
    return {.images = {MustOpen(base_ref_)}, .upper = upper_, .destination = destination};
  }
  CommitResult MustCommit(const CommitOptions& options) {
    absl::StatusOr<CommitResult> result = Commit(options);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : CommitResult();
  }
  ino_t InodeOf(const std::string& layout, const Digest& blob) {
    struct stat info {};
    EXPECT_EQ(::stat(fmt::format("{}/blobs/sha256/{}", layout, blob.Hex()).c_str(), &info), 0);
    return info.st_ino;
  }

  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string base_ = directory_.path() + "/base";
  const std::string base_ref_ = "oci:" + base_ + ":app";
  const std::string other_ = directory_.path() + "/other";
  const std::string upper_ = directory_.path() + "/upper";
};

TEST_F(CommitTest, WhatWasWrittenIsOneMoreLayer) {
  CommitOptions options = Options("oci:" + base_ + ":work");
  options.comment = "first try";
  const CommitResult result = MustCommit(options);
  const Image before = MustOpen(base_ref_);
  const Image after = MustOpen("oci:" + base_ + ":work");
  EXPECT_EQ(after.manifest_digest, result.manifest_digest);
  ASSERT_EQ(after.layers.size(), 3u);
  EXPECT_EQ(after.layers[0].digest, before.layers[0].digest);
  EXPECT_EQ(after.manifest.layers[0].annotations, before.manifest.layers[0].annotations);
  EXPECT_EQ(after.layers[1].digest, before.layers[1].digest);
  EXPECT_EQ(after.layers[2].digest, result.layers.back().blob.digest);
  EXPECT_THAT(ReadLayer(after, 2), ElementsAre(Pair("new", "new content"), Pair("sub/", ""),
                                               Pair("sub/file", Noise(300'000, 2))));
  EXPECT_EQ(result.layers.back().inodes, 4u);
  // Nothing of the layers below was touched.
  EXPECT_EQ(result.layers_there, 2u);
  EXPECT_EQ(result.layers_linked + result.layers_copied + result.layers_mounted, 0u);

  EXPECT_EQ(after.manifest.annotations, before.manifest.annotations);
  const auto old_config = nlohmann::json::parse(before.config_json);
  auto config = nlohmann::json::parse(after.config_json);
  EXPECT_EQ(config["rootfs"]["diff_ids"].size(), 3u);
  EXPECT_EQ(config["rootfs"]["diff_ids"][2], result.layers.back().blob.digest.ToString());
  ASSERT_EQ(config["history"].size(), 3u);
  EXPECT_EQ(config["history"][2]["comment"], "first try");
  EXPECT_EQ(config["history"][2]["created"], config["created"]);
  config.erase("rootfs");
  config.erase("history");
  config.erase("created");
  for (const auto& [key, value] : config.items()) EXPECT_EQ(value, old_config[key]) << key;
}

TEST_F(CommitTest, AnotherLayoutGetsLinksOfTheLayersBelow) {
  const CommitResult result = MustCommit(Options("oci:" + other_ + ":work"));
  EXPECT_EQ(result.layers_linked, 2u);
  const Image after = MustOpen("oci:" + other_ + ":work");
  for (const auto& layer : MustOpen(base_ref_).layers) {
    EXPECT_EQ(InodeOf(base_, layer.digest), InodeOf(other_, layer.digest));
  }
  // And needs nothing more when it has them.
  EXPECT_EQ(MustCommit(Options("oci:" + other_ + ":more")).layers_there, 2u);
  stdfs::remove_all(base_);
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + other_ + ":work"), 1).at("b"), "b");
}

TEST_F(CommitTest, AnotherFileSystemGetsCopiesThatAreChecked) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no other file system";
  const auto away = TemporaryDirectory::Create("/dev/shm", "lamina-commit-");
  ASSERT_TRUE(away.ok()) << away.status();
  const std::string destination = away->path() + "/layout";
  const CommitResult result = MustCommit(Options("oci:" + destination + ":work"));
  const Image base = MustOpen(base_ref_);
  EXPECT_EQ(result.layers_copied, 2u);
  EXPECT_EQ(result.copied_bytes, base.layers[0].size + base.layers[1].size);
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + destination + ":work"), 0).at("a"), Noise(100'000, 1));

  stdfs::remove_all(destination);
  const std::string blob = fmt::format("{}/blobs/sha256/{}", base_, base.layers[0].digest.Hex());
  std::string content = ReadFile(blob);
  content[100] ^= 1;
  WriteFile(blob, content);
  const absl::Status status = Commit(Options("oci:" + destination + ":work")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(base.layers[0].digest.ToString()));
  EXPECT_TRUE(stdfs::is_empty(away->path()));
}

TEST_F(CommitTest, TheSameTagCanBeCommittedToAgain) {
  CommitOptions options = Options(base_ref_);
  const Image base = options.images[0];
  MustCommit(options);
  // The tag has moved; the image that the upper lies on is found by its digest.
  const auto pinned = PinReference(base_ref_, base.manifest_digest);
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  options.images = {MustOpen(*pinned)};
  EXPECT_EQ(options.images[0].manifest_digest, base.manifest_digest);
  WriteFile(upper_ + "/new", "newer");
  MustCommit(options);
  const Image after = MustOpen(base_ref_);
  ASSERT_EQ(after.layers.size(), 3u);
  EXPECT_EQ(ReadLayer(after, 2).at("new"), "newer");
}

TEST_F(CommitTest, ImagesOnTopOfEachOtherBecomeOne) {
  WriteLayout(directory_.path() + "/source", "tools", {PlainLayer({{"tool", "1"}})});
  MustConvert("oci:" + directory_.path() + "/source:tools", "oci:" + other_ + ":tools");
  CommitOptions options = Options("oci:" + base_ + ":all");
  options.images.push_back(MustOpen("oci:" + other_ + ":tools"));
  const CommitResult result = MustCommit(options);
  EXPECT_EQ(result.layers_there, 2u);
  EXPECT_EQ(result.layers_linked, 1u);
  const Image after = MustOpen("oci:" + base_ + ":all");
  ASSERT_EQ(after.layers.size(), 4u);
  EXPECT_EQ(ReadLayer(after, 2).at("tool"), "1");
  EXPECT_EQ(after.config.diff_ids[2], options.images[1].config.diff_ids[0]);
}

TEST_F(CommitTest, WithoutImagesBelowItIsTheLayerAlone) {
  const CommitResult result = MustCommit({.upper = upper_, .destination = "oci:" + other_});
  const Image after = MustOpen("oci:" + other_);
  ASSERT_EQ(after.layers.size(), 1u);
  EXPECT_THAT(after.config.diff_ids, ElementsAre(result.layers.back().blob.digest));
}

TEST_F(CommitTest, WritersArePausedOnceAndGoOnAlsoAfterAnError) {
  int paused = 0;
  int resumed = 0;
  CommitOptions options = Options("oci:" + base_ + ":work");
  options.pause = [&] {
    ++paused;
    WriteFile(upper_ + "/new", "at the pause");
    return absl::OkStatus();
  };
  options.resume = [&] { ++resumed; };
  MustCommit(options);
  EXPECT_EQ(paused, 1);
  EXPECT_EQ(resumed, 1);
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + base_ + ":work"), 2).at("new"), "at the pause");

  options.upper = directory_.path() + "/gone";
  EXPECT_FALSE(Commit(options).ok());
  options.upper = upper_;
  options.pause = [] { return absl::DeadlineExceededError("they do not stop"); };
  const absl::Status status = Commit(options).status();
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("commit to oci:"), HasSubstr("they do not stop")));
  EXPECT_EQ(resumed, paused);
}

TEST_F(CommitTest, AfterAnErrorTheDestinationIsAsItWas) {
  const auto before = Snapshot(base_);
  if (::geteuid() != 0) GTEST_SKIP() << "marks of overlayfs need root";
  RunCommand("setfattr -n trusted.overlay.metacopy " + upper_ + "/new");
  const absl::Status status = Commit(Options("oci:" + base_ + ":work")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("upper/new"), HasSubstr("trusted.overlay.metacopy")));
  EXPECT_EQ(Snapshot(base_), before);
  EXPECT_FALSE(Commit(Options("oci:" + upper_ + ":work")).ok());  // no layout, and not empty
  EXPECT_FALSE(Commit(Options("dir:" + other_)).ok());
}

TEST_F(CommitTest, AnImageOfTheMostLayersIsNotMadeLarger) {
  CommitOptions options = Options("oci:" + base_ + ":work");
  options.images[0].layers.resize(oci::kMaxLayers);
  const absl::Status status = Commit(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("501 layers"));
}

}  // namespace
}  // namespace lamina::fs
