// SPDX-License-Identifier: Apache-2.0
#include "fs/image/oci.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chunkstore/base/json.h"

namespace lamina::oci {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kDigest = "sha256:" + std::string(64, 'a');

std::string DescriptorJson(std::string_view size = "7") {
  return fmt::format("{{\"mediaType\":\"a/b\",\"digest\":\"{}\",\"size\":{}}}", kDigest, size);
}

std::string ManifestJson(std::string_view layers, std::string_view more = "") {
  return fmt::format("{{\"schemaVersion\":2,\"config\":{},\"layers\":[{}]{}}}", DescriptorJson(),
                     layers, more);
}

std::string ErrorOf(const absl::Status& status) { return std::string(status.message()); }

TEST(ManifestTest, ReadsOciAndDockerManifests) {
  const auto oci = Manifest::Parse(ManifestJson(DescriptorJson("12")));
  ASSERT_TRUE(oci.ok()) << oci.status();
  EXPECT_EQ(oci->media_type, kManifestType);
  EXPECT_EQ(oci->layers.at(0).size, 12u);
  EXPECT_EQ(oci->layers.at(0).digest.ToString(), kDigest);

  const auto docker =
      Manifest::Parse(ManifestJson("", fmt::format(",\"mediaType\":\"{}\"", kDockerManifestType)));
  ASSERT_TRUE(docker.ok()) << docker.status();
  EXPECT_EQ(docker->media_type, kDockerManifestType);
}

TEST(ManifestTest, TakesNullForAMissingMember) {
  EXPECT_TRUE(Manifest::Parse(ManifestJson("", ",\"annotations\":null")).ok());
}

TEST(ManifestTest, WritesEqualManifestsAsEqualBytes) {
  Manifest manifest{.media_type = std::string(kManifestType),
                    .annotations = {{"b", "2"}, {"a", "1"}}};
  manifest.layers.resize(2);
  const std::string json = manifest.ToJson();
  const auto again = Manifest::Parse(json);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->ToJson(), json);
  EXPECT_THAT(json, HasSubstr("\"annotations\":{\"a\":\"1\",\"b\":\"2\"}"));
}

struct HostileCase {
  std::string json;
  std::string error;
};

TEST(ManifestTest, RefusesHostileDocumentsNamingTheField) {
  const std::string deep = std::string(5000, '[') + std::string(5000, ']');
  const std::vector<HostileCase> cases = {
      {"", "not valid JSON"},
      {"[]", "manifest: not an object"},
      {"{\"schemaVersion\":2} x", "not valid JSON"},
      {deep, "nested more than"},
      {"{}", "'schemaVersion' is missing"},
      {"{\"schemaVersion\":1}", "schemaVersion: 1 is not supported"},
      {"{\"schemaVersion\":\"2\"}", "schemaVersion: not a number"},
      {"{\"schemaVersion\":2,\"schemaVersion\":2}", "'schemaVersion' is there twice"},
      {ManifestJson("", ",\"mediaType\":\"" + std::string(kIndexType) + "\""), "mediaType"},
      {ManifestJson("", ",\"manifests\":[]"), "ambiguous"},
      {"{\"schemaVersion\":2,\"layers\":[]}", "'config' is missing"},
      {ManifestJson("1"), "layers[0]: not an object"},
      {ManifestJson(DescriptorJson() + "," + DescriptorJson("-1")), "layers[1].size: negative"},
      {ManifestJson(DescriptorJson("1.5")), "layers[0].size: not a whole number"},
      {ManifestJson(DescriptorJson("1e400")), "not valid JSON"},
      {ManifestJson(DescriptorJson("9223372036854775808")), "layers[0].size: 9223372036854775808"},
      {ManifestJson(DescriptorJson("99999999999999999999999")), "layers[0].size: not a whole"},
      {ManifestJson(DescriptorJson("\"7\"")), "layers[0].size: not a number"},
      {ManifestJson("{\"mediaType\":\"a/b\",\"digest\":\"sha512:00\",\"size\":1}"),
       "layers[0].digest: 'sha512:00' is not a digest"},
      {ManifestJson("{\"mediaType\":\"a/b\",\"digest\":\"sha256:../../etc\",\"size\":1}"),
       "layers[0].digest"},
      {ManifestJson("{\"mediaType\":\"a/b\",\"size\":1}"), "layers[0]: 'digest' is missing"},
      {ManifestJson("", ",\"annotations\":{\"k\":1}"), "annotations: the value of 'k'"},
      {"{\"schemaVersion\":2,\"\xff\":1}", "not valid JSON"},
  };
  for (const HostileCase& hostile : cases) {
    const auto manifest = Manifest::Parse(hostile.json);
    ASSERT_FALSE(manifest.ok()) << hostile.json;
    EXPECT_THAT(ErrorOf(manifest.status()), HasSubstr(hostile.error)) << hostile.json;
    EXPECT_THAT(ErrorOf(manifest.status()), HasSubstr("manifest"));
  }
}

TEST(ManifestTest, RefusesMoreLayersThanOverlayfsStacks) {
  std::string layers = DescriptorJson();
  for (size_t i = 1; i <= kMaxLayers; ++i) layers += "," + DescriptorJson();
  const auto manifest = Manifest::Parse(ManifestJson(layers));
  EXPECT_THAT(ErrorOf(manifest.status()), HasSubstr("501 layers"));
}

TEST(ManifestTest, RefusesADocumentThatIsTooLarge) {
  const auto manifest = Manifest::Parse(std::string(kMaxDocumentSize + 1, ' '));
  EXPECT_TRUE(absl::IsResourceExhausted(manifest.status())) << manifest.status();
}

TEST(IndexTest, ReadsPlatformsAndNames) {
  const auto index = Index::Parse(fmt::format(
      "{{\"schemaVersion\":2,\"manifests\":[{{\"mediaType\":\"{}\",\"digest\":\"{}\",\"size\":1,"
      "\"platform\":{{\"os\":\"linux\",\"architecture\":\"arm64\",\"variant\":\"v8\"}},"
      "\"annotations\":{{\"{}\":\"tag\"}}}}]}}",
      kManifestType, kDigest, kRefNameKey));
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->manifests.at(0).platform->ToString(), "linux/arm64/v8");
  EXPECT_EQ(Index::Parse(index->ToJson())->ToJson(), index->ToJson());
}

TEST(IndexTest, ReplacesOneNameAndKeepsAllElse) {
  const std::string json = fmt::format(
      "{{\"schemaVersion\":2,\"x\":1,\"manifests\":["
      "{{\"mediaType\":\"m\",\"digest\":\"{0}\",\"size\":1,\"annotations\":{{\"{1}\":\"a\"}}}},"
      "{{\"mediaType\":\"m\",\"digest\":\"{0}\",\"size\":2,\"annotations\":{{\"{1}\":\"b\"}},"
      "\"urls\":[\"u\"]}},"
      "{{\"mediaType\":\"m\",\"digest\":\"{0}\",\"size\":3}}]}}",
      kDigest, kRefNameKey);
  Descriptor manifest{.media_type = "new", .annotations = {{std::string(kRefNameKey), "a"}}};
  const auto replaced = ReplaceInIndex(json, manifest);
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_THAT(*replaced, HasSubstr("\"urls\":[\"u\"]"));
  EXPECT_THAT(*replaced, HasSubstr("\"x\":1"));
  const auto index = Index::Parse(*replaced);
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_EQ(index->manifests.size(), 3u);
  EXPECT_EQ(index->manifests[0].size, 2u);
  EXPECT_EQ(index->manifests[1].size, 3u);
  EXPECT_EQ(index->manifests[2].media_type, "new");
}

TEST(ImageConfigTest, ReadsWhatAProcessNeeds) {
  const auto config = ImageConfig::Parse(fmt::format(
      "{{\"os\":\"linux\",\"architecture\":\"amd64\",\"config\":{{\"Entrypoint\":[\"/e\"],"
      "\"Cmd\":null,\"Env\":[\"A=1\",\"B=\"],\"WorkingDir\":\"/w\",\"User\":\"1:2\"}},"
      "\"rootfs\":{{\"type\":\"layers\",\"diff_ids\":[\"{}\"]}}}}",
      kDigest));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->entrypoint, ElementsAre("/e"));
  EXPECT_TRUE(config->command.empty());
  EXPECT_THAT(config->environment, ElementsAre("A=1", "B="));
  EXPECT_EQ(config->working_directory, "/w");
  EXPECT_EQ(config->user, "1:2");
  EXPECT_EQ(config->diff_ids.at(0).ToString(), kDigest);
}

TEST(ImageConfigTest, RefusesWrongTypesNamingTheField) {
  const std::string head = "{\"os\":\"linux\",\"architecture\":\"amd64\",";
  const std::string rootfs = "\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[]}";
  const std::vector<HostileCase> cases = {
      {"{\"os\":\"linux\"," + rootfs + "}", "'architecture' is missing"},
      {head + "\"config\":{}}", "'rootfs' is missing"},
      {head + "\"rootfs\":{\"type\":\"tree\"}}", "rootfs.type: 'tree'"},
      {head + "\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[1]}}", "rootfs.diff_ids[0]: not a"},
      {head + rootfs + ",\"config\":[]}", "config: not an object"},
      {head + rootfs + ",\"config\":{\"Env\":[\"A=1\",2]}}", "config.Env[1]: not a string"},
      {head + rootfs + ",\"config\":{\"Cmd\":\"sh\"}}", "config.Cmd: not a list"},
  };
  for (const HostileCase& hostile : cases) {
    const auto config = ImageConfig::Parse(hostile.json);
    ASSERT_FALSE(config.ok()) << hostile.json;
    EXPECT_THAT(ErrorOf(config.status()), HasSubstr(hostile.error)) << hostile.json;
  }
}

Descriptor LaminaLayer() {
  return {.media_type = std::string(kLaminaLayerType),
          .size = 1000,
          .annotations = {{std::string(kSectionTableOffsetKey), "776"},
                          {std::string(kSectionTableDigestKey), kDigest}}};
}

TEST(DescriptorTest, ReadsTheAnnotationsOfALaminaLayer) {
  const auto layer = LaminaLayer().ToLayerDescriptor();
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->section_table_offset, 776u);
  EXPECT_EQ(layer->section_table_digest.ToString(), kDigest);
}

TEST(DescriptorTest, RefusesWrongAnnotationsOfALaminaLayer) {
  for (const char* offset : {"", "-1", "1000", " 7", "7x", "0x7", "99999999999999999999"}) {
    Descriptor layer = LaminaLayer();
    layer.annotations[std::string(kSectionTableOffsetKey)] = offset;
    EXPECT_FALSE(layer.ToLayerDescriptor().ok()) << offset;
  }
  Descriptor layer = LaminaLayer();
  layer.annotations.erase(std::string(kSectionTableDigestKey));
  EXPECT_TRUE(absl::IsFailedPrecondition(layer.ToLayerDescriptor().status()));
  layer = LaminaLayer();
  layer.media_type = "application/vnd.oci.image.layer.v1.tar";
  EXPECT_TRUE(absl::IsFailedPrecondition(layer.ToLayerDescriptor().status()));
}

TEST(DescriptorTest, TakesNoHintThatCannotBe) {
  Descriptor layer = LaminaLayer();
  EXPECT_EQ(layer.HotFrames(), 0);
  const std::pair<const char*, uint32_t> cases[] = {
      {"0", 0}, {"17", 17}, {"4294967295", 4294967295}, {"4294967296", 0}, {"-1", 0},
      {"", 0},  {"17 ", 0}, {"99999999999999999999", 0}};
  for (const auto& [text, frames] : cases) {
    layer.annotations[std::string(kHotFramesKey)] = text;
    EXPECT_EQ(layer.HotFrames(), frames) << text;
    EXPECT_TRUE(layer.ToLayerDescriptor().ok()) << text;
  }
}

TEST(PlatformTest, ParsesAndPrints) {
  for (const char* text : {"linux/amd64", "linux/arm64/v8", "windows/386"}) {
    const auto platform = Platform::Parse(text);
    ASSERT_TRUE(platform.ok()) << platform.status();
    EXPECT_EQ(platform->ToString(), text);
  }
  for (const char* text : {"", "linux", "linux/", "/amd64", "a/b/c/d", "linux/a b", "linux//v8"}) {
    EXPECT_FALSE(Platform::Parse(text).ok()) << text;
  }
}

TEST(PlatformTest, EmptyVariantMatchesAny) {
  const Platform v8{"linux", "arm64", "v8"};
  EXPECT_TRUE((Platform{"linux", "arm64", ""}.Matches(v8)));
  EXPECT_TRUE((v8.Matches({"linux", "arm64", ""})));
  EXPECT_FALSE((Platform{"linux", "arm64", "v9"}.Matches(v8)));
  EXPECT_FALSE((Platform{"linux", "amd64", ""}.Matches(v8)));
}

TEST(PlatformTest, HostIsWhatThisProgramRunsOn) {
  EXPECT_EQ(Platform::Host().os, "linux");
  EXPECT_FALSE(Platform::Host().architecture.empty());
}

}  // namespace
}  // namespace lamina::oci
