// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;

const oci::Platform kAmd64{"linux", "amd64", ""};
const oci::Platform kArm64{"linux", "arm64", ""};

class LayoutTest : public ::testing::Test {
 protected:
  // A manifest whose only difference is its configuration.
  oci::Descriptor Manifest(const std::optional<oci::Platform>& platform, const std::string& tag) {
    oci::Descriptor manifest =
        WriteManifest(path_, MakeConfigJson({}, platform.value_or(kAmd64)), {});
    manifest.platform = platform;
    if (!tag.empty()) manifest.annotations[std::string(oci::kRefNameKey)] = tag;
    return manifest;
  }
  oci::Descriptor Index(const std::vector<oci::Descriptor>& manifests, const std::string& tag) {
    oci::Descriptor index =
        WriteBlob(path_, oci::Index{.manifests = manifests}.ToJson(), oci::kIndexType);
    if (!tag.empty()) index.annotations[std::string(oci::kRefNameKey)] = tag;
    return index;
  }
  absl::StatusOr<oci::Descriptor> Find(std::string_view tag, const oci::Platform& platform) {
    const auto layout = Layout::OpenDirectory(path_);
    if (!layout.ok()) return layout.status();
    return FindManifest(*layout, tag, platform);
  }

  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string path_ = directory_.path() + "/layout";
};

TEST_F(LayoutTest, OneImageNeedsNoTag) {
  const oci::Descriptor manifest = Manifest(std::nullopt, "latest");
  WriteIndex(path_, {manifest});
  EXPECT_EQ(Find("", kAmd64)->digest, manifest.digest);
  EXPECT_EQ(Find("latest", kAmd64)->digest, manifest.digest);
  EXPECT_THAT(Find("other", kAmd64).status().ToString(), HasSubstr("there are: latest"));
}

TEST_F(LayoutTest, SeveralImagesNeedATag) {
  const oci::Descriptor first = Manifest(kAmd64, "first");
  const oci::Descriptor second = Manifest(kArm64, "second");
  WriteIndex(path_, {first, second});
  EXPECT_EQ(Find("second", kArm64)->digest, second.digest);
  EXPECT_THAT(Find("", kAmd64).status().ToString(), HasSubstr("there are: first, second"));
}

TEST_F(LayoutTest, PlatformDecidesInNestedIndexes) {
  const oci::Descriptor amd64 = Manifest(kAmd64, "");
  const oci::Descriptor arm64 = Manifest(oci::Platform{"linux", "arm64", "v8"}, "");
  const oci::Descriptor inner = Index({amd64, arm64}, "");
  WriteIndex(path_, {Index({inner}, "multi")});
  EXPECT_EQ(Find("multi", kAmd64)->digest, amd64.digest);
  EXPECT_EQ(Find("", kArm64)->digest, arm64.digest);
  EXPECT_THAT(Find("multi", {"linux", "s390x", ""}).status().ToString(),
              HasSubstr("there is linux/amd64, linux/arm64/v8"));
}

TEST_F(LayoutTest, ImageForOnePlatformIsTakenAsItIs) {
  const oci::Descriptor arm64 = Manifest(kArm64, "");
  const oci::Descriptor attestation = Manifest(oci::Platform{"unknown", "unknown", ""}, "");
  WriteIndex(path_, {Index({arm64, attestation}, "x")});
  EXPECT_EQ(Find("x", kAmd64)->digest, arm64.digest);
}

TEST_F(LayoutTest, ImageOfNothingIsAnError) {
  WriteIndex(path_, {Index({}, "x")});
  EXPECT_TRUE(absl::IsNotFound(Find("x", kAmd64).status()));
  WriteIndex(path_, {});
  EXPECT_TRUE(absl::IsNotFound(Find("", kAmd64).status()));
}

TEST_F(LayoutTest, AmbiguousPlatformIsAnError) {
  const oci::Descriptor v6 = Manifest(oci::Platform{"linux", "arm", "v6"}, "");
  const oci::Descriptor v7 = Manifest(oci::Platform{"linux", "arm", "v7"}, "");
  WriteIndex(path_, {Index({v6, v7}, "x")});
  EXPECT_EQ(Find("x", {"linux", "arm", "v7"})->digest, v7.digest);
  EXPECT_THAT(Find("x", {"linux", "arm", ""}).status().ToString(), HasSubstr("2 images fit"));
}

TEST_F(LayoutTest, IndexesThatMultiplyAreRefused) {
  oci::Descriptor index = Index({Manifest(kAmd64, "")}, "");
  for (int i = 0; i < 20; ++i) index = Index({index, index}, "");
  WriteIndex(path_, {index});
  EXPECT_TRUE(absl::IsResourceExhausted(Find("", kAmd64).status()));
}

TEST_F(LayoutTest, DocumentsAreVerified) {
  const oci::Descriptor manifest = Manifest(kAmd64, "");
  WriteIndex(path_, {manifest});
  const std::string file = fmt::format("{}/blobs/sha256/{}", path_, manifest.digest.Hex());
  const auto layout = Layout::OpenDirectory(path_);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_TRUE(layout->ReadDocument(manifest, "manifest").ok());

  std::string content = ReadFile(file);
  content.back() ^= 1;
  WriteFile(file, content);
  EXPECT_THAT(layout->ReadDocument(manifest, "manifest").status().ToString(),
              HasSubstr("digest mismatch"));
  WriteFile(file, content + "x");
  EXPECT_TRUE(absl::IsDataLoss(layout->ReadDocument(manifest, "manifest").status()));
  std::filesystem::remove(file);
  EXPECT_TRUE(absl::IsNotFound(layout->ReadDocument(manifest, "manifest").status()));
}

TEST_F(LayoutTest, BlobThatIsNotAFileIsRefusedWithoutHanging) {
  const oci::Descriptor manifest = Manifest(kAmd64, "");
  WriteIndex(path_, {manifest});
  const std::string file = fmt::format("{}/blobs/sha256/{}", path_, manifest.digest.Hex());
  std::filesystem::remove(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0644), 0);
  EXPECT_THAT(Layout::OpenDirectory(path_)->ReadDocument(manifest, "m").status().ToString(),
              HasSubstr("not a regular file"));
}

TEST_F(LayoutTest, RefusesWhatIsNotALayout) {
  EXPECT_TRUE(absl::IsNotFound(Layout::OpenDirectory(path_).status()));
  WriteIndex(path_, {Manifest(kAmd64, "")});
  WriteFile(path_ + "/oci-layout", "{\"imageLayoutVersion\":\"2.0.0\"}");
  EXPECT_THAT(Layout::OpenDirectory(path_).status().ToString(), HasSubstr("2.0.0"));
}

TEST_F(LayoutTest, ReadsAnArchiveInPlace) {
  WriteIndex(path_, {Manifest(kAmd64, "tag")});
  const std::string archive = directory_.path() + "/archive.tar";
  RunCommand(fmt::format("tar -C {} -cf {} .", path_, archive));
  const auto layout = Layout::OpenArchive(archive);
  ASSERT_TRUE(layout.ok()) << layout.status();
  const auto manifest = FindManifest(*layout, "tag", kAmd64);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_TRUE(layout->ReadDocument(*manifest, "manifest").ok());
}

}  // namespace
}  // namespace lamina::fs
