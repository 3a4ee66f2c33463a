// SPDX-License-Identifier: Apache-2.0
#include "fs/image/source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "fs/image/docker_archive.h"
#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;

const oci::Platform kAmd64{"linux", "amd64", ""};

class SourceTest : public ::testing::Test {
 protected:
  absl::StatusOr<SourceImage> Open(const std::string& reference,
                                   const std::optional<oci::Platform>& platform = kAmd64) {
    const auto parsed = ImageReference::Parse(reference);
    if (!parsed.ok()) return parsed.status();
    return OpenSource(*parsed, platform);
  }
  // The error for an image with one layer of this media type.
  std::string ErrorForLayer(std::string_view media_type, bool has_content) {
    const std::string tar = MakeTar({{"a", "b"}});
    oci::Descriptor layer = WriteBlob(layout_, tar, media_type);
    if (!has_content) {
      std::filesystem::remove(fmt::format("{}/blobs/sha256/{}", layout_, layer.digest.Hex()));
    }
    WriteIndex(layout_, {WriteManifest(layout_, MakeConfigJson({layer.digest}), {layer})});
    return Open("oci:" + layout_).status().ToString();
  }

  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string layout_ = directory_.path() + "/layout";
  const std::string archive_ = directory_.path() + "/archive.tar";
};

TEST_F(SourceTest, ReadsALayoutAndKeepsTheConfigurationByteForByte) {
  const TestLayer layer = PlainLayer({{"a", "b"}});
  WriteLayout(layout_, "tag", {layer, layer});
  const auto source = Open(fmt::format("oci:{}:tag", layout_));
  ASSERT_TRUE(source.ok()) << source.status();
  const Digest digest = Digest::Of(AsBytes(layer.tar));
  EXPECT_EQ(source->config_json, MakeConfigJson({digest, digest}));
  ASSERT_EQ(source->layers.size(), 2u);
  EXPECT_EQ(source->layers[1].digest, digest);
  EXPECT_EQ(source->layers[1].content.size, layer.blob.size());
  EXPECT_EQ(source->annotations.at("org.example.key"), "value");
}

TEST_F(SourceTest, RefusesAnotherPlatformThanAsked) {
  WriteLayout(layout_, "tag", {});
  EXPECT_TRUE(Open("oci:" + layout_, std::nullopt).ok());
  const auto arm64 = Open("oci:" + layout_, oci::Platform{"linux", "arm64", ""});
  EXPECT_THAT(arm64.status().ToString(), HasSubstr("for linux/amd64, not for linux/arm64"));
}

TEST_F(SourceTest, NamesLayersThatCannotBeConverted) {
  EXPECT_THAT(ErrorForLayer(oci::kLaminaLayerType, true), HasSubstr("already converted"));
  EXPECT_THAT(ErrorForLayer(std::string(kGzipLayer) + "+encrypted", true), HasSubstr("encrypted"));
  EXPECT_THAT(ErrorForLayer("application/vnd.cncf.helm.chart", true), HasSubstr("helm.chart"));
  EXPECT_THAT(ErrorForLayer("application/vnd.oci.image.layer.nondistributable.v1.tar", false),
              HasSubstr("foreign"));
  EXPECT_EQ(ErrorForLayer("application/vnd.oci.image.layer.nondistributable.v1.tar", true), "OK");
  EXPECT_THAT(ErrorForLayer(kTarLayer, false), HasSubstr("layer 0 (sha256:"));
}

TEST_F(SourceTest, RefusesManifestAndConfigurationThatDisagree) {
  const oci::Descriptor layer = WriteBlob(layout_, MakeTar({{"a", "b"}}), kTarLayer);
  WriteIndex(layout_, {WriteManifest(layout_, MakeConfigJson({}), {layer})});
  EXPECT_THAT(Open("oci:" + layout_).status().ToString(),
              HasSubstr("the manifest has 1 layers, the image configuration 0"));
}

TEST_F(SourceTest, ReadsOldDockerArchivesWithLinkedLayers) {
  const std::string tar = MakeTar({{"a", "b"}});
  const Digest id = Digest::Of(AsBytes(tar));
  const std::string config = MakeConfigJson({id, id});
  const std::string config_name = Digest::Of(AsBytes(config)).Hex() + ".json";
  WriteFile(archive_,
            MakeTar({{"one/layer.tar", tar},
                     {"two/layer.tar", "", '2', "../one/layer.tar"},
                     {config_name, config},
                     {"manifest.json",
                      fmt::format("[{{\"Config\":\"{}\",\"RepoTags\":[\"app:1\"],\"Layers\":"
                                  "[\"one/layer.tar\",\"two/layer.tar\"]}}]",
                                  config_name)}}));
  for (const char* reference : {"", ":app:1", ":docker.io/library/app:1", ":@0"}) {
    const auto source = Open("docker-archive:" + archive_ + reference);
    ASSERT_TRUE(source.ok()) << source.status();
    EXPECT_EQ(source->layers.at(1).content.ReadAll(1 << 20).value(), tar);
    EXPECT_EQ(source->layers[1].diff_id, id);
    EXPECT_EQ(source->config_json, config);
  }
  EXPECT_THAT(Open("docker-archive:" + archive_ + ":app:2").status().ToString(),
              HasSubstr("there are: app:1"));
}

TEST_F(SourceTest, ChecksTheConfigurationOfADockerArchive) {
  const std::string name = std::string(64, 'a') + ".json";
  WriteFile(archive_, MakeTar({{name, MakeConfigJson({})},
                               {"manifest.json", fmt::format("[{{\"Config\":\"{}\"}}]", name)}}));
  EXPECT_THAT(Open("docker-archive:" + archive_).status().ToString(), HasSubstr("digest mismatch"));
}

TEST(DockerManifestTest, RefusesHostileDocumentsNamingTheField) {
  EXPECT_FALSE(ParseDockerManifest("{}").ok());
  EXPECT_THAT(ParseDockerManifest("[{}]").status().ToString(), HasSubstr("'Config' is missing"));
  EXPECT_THAT(ParseDockerManifest("[{\"Config\":\"c\",\"Layers\":[1]}]").status().ToString(),
              HasSubstr("[0].Layers[0]: not a string"));
}

}  // namespace
}  // namespace lamina::fs
