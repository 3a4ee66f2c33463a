// SPDX-License-Identifier: Apache-2.0
#include "fs/image/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "fs/image/layer_stream.h"
#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace stdfs = std::filesystem;

// A layer with small, large, empty, equal and linked files.
std::vector<TarEntry> Files(uint32_t seed) {
  const std::string large = Noise(700000, seed) + std::string(2000000, 'x') + Noise(5, seed + 1);
  return {{"bin/", "", '5'},
          {"bin/tool", Noise(10000, seed)},
          {"bin/same", Noise(10000, seed)},
          {"large", large},
          {"empty", ""},
          {"hard", "", '1', "large"},
          {"soft", "", '2', "bin/tool"}};
}

std::map<std::string, std::string> ExpectedFiles(const std::vector<TarEntry>& entries) {
  std::map<std::string, std::string> files;
  for (const TarEntry& entry : entries) {
    files[entry.name] = entry.type == '2' ? entry.link : entry.content;
    if (entry.type == '1') files[entry.name] = files.at(entry.link);
  }
  return files;
}

class ConvertTest : public ::testing::Test {
 protected:
  std::string ConvertError(const std::string& source) {
    const auto before = Snapshot(output_);
    const auto result = Convert({.source = source, .destination = "oci:" + output_ + ":x"});
    EXPECT_FALSE(result.ok());
    EXPECT_EQ(Snapshot(output_), before);
    for (const auto& entry : stdfs::directory_iterator(directory_.path())) {
      EXPECT_THAT(entry.path().filename().string(), ::testing::Not(HasSubstr("lamina-tmp")));
    }
    return result.status().ToString();
  }

  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string source_ = directory_.path() + "/source";
  const std::string output_ = directory_.path() + "/output";
};

TEST_F(ConvertTest, ContentSurvivesInEveryKindOfLayer) {
  std::vector<TestLayer> layers;
  for (uint32_t seed = 0; seed < 6; ++seed) layers.push_back(PlainLayer(Files(seed)));
  const auto half = [&](int i, bool second) {
    const std::string_view tar = layers[i].tar;
    return second ? tar.substr(tar.size() / 2) : tar.substr(0, tar.size() / 2);
  };
  layers[1] = {layers[1].tar, Gzip(layers[1].tar), std::string(kGzipLayer)};
  layers[2] = {layers[2].tar, Gzip(half(2, false)) + Gzip(half(2, true)), std::string(kGzipLayer)};
  layers[3] = {layers[3].tar, GzipWithOptionalFields(layers[3].tar), std::string(kGzipLayer)};
  layers[4] = {layers[4].tar, Zstd(half(4, false)) + Zstd(half(4, true)), std::string(kZstdLayer)};
  // The type says gzip, but the content is zstd, as some registries have it.
  layers[5] = {layers[5].tar, Zstd(layers[5].tar), std::string(kGzipLayer)};
  WriteLayout(source_, "app", layers);

  const ConvertResult result =
      MustConvert(fmt::format("oci:{}:app", source_), fmt::format("oci:{}:app", output_));
  const Image image = MustOpen(fmt::format("oci:{}:app", output_));
  ASSERT_EQ(image.layers.size(), layers.size());
  EXPECT_EQ(image.manifest_digest, result.manifest_digest);
  for (uint32_t i = 0; i < layers.size(); ++i) {
    EXPECT_EQ(ReadLayer(image, i), ExpectedFiles(Files(i))) << "layer " << i;
    const Digest source = Digest::Of(AsBytes(layers[i].blob));
    EXPECT_EQ(result.layers[i].source_digest, source);
    EXPECT_EQ(image.manifest.layers[i].annotations.at(std::string(oci::kSourceDigestKey)),
              source.ToString());
  }
  EXPECT_EQ(result.layers[0].files, 7u);  // hard links are one, the root counts
}

TEST_F(ConvertTest, ConfigurationAndAnnotationsAreKept) {
  const TestLayer layer = PlainLayer(Files(1));
  WriteLayout(source_, "app", {layer});
  MustConvert("oci:" + source_, "oci:" + output_);
  const Image image = MustOpen("oci:" + output_);
  EXPECT_EQ(image.config_json, MakeConfigJson({Digest::Of(AsBytes(layer.tar))}));
  EXPECT_EQ(image.manifest.annotations.at("org.example.key"), "value");
  EXPECT_EQ(image.manifest.media_type, oci::kManifestType);
}

TEST_F(ConvertTest, SameBytesWhateverTheNumberOfJobs) {
  const std::string tar = MakeTar(Files(1));
  WriteLayout(source_, "app", {{tar, Gzip(tar), std::string(kGzipLayer)}, PlainLayer(Files(2))});
  std::map<std::string, std::string> first;
  for (const int jobs : {1, 2, 5, 1}) {
    MustConvert("oci:" + source_, fmt::format("oci:{}:app", output_), jobs);
    const auto files = Snapshot(output_);
    if (first.empty()) first = files;
    EXPECT_EQ(files, first) << jobs << " jobs";
    stdfs::remove_all(output_);
  }
}

TEST_F(ConvertTest, LayerDependsOnItsTarArchiveAlone) {
  const std::string tar = MakeTar(Files(1));
  WriteLayout(source_ + "1", "a",
              {PlainLayer(Files(2)), {tar, Gzip(tar), std::string(kGzipLayer)}});
  WriteLayout(source_ + "2", "b", {{tar, Zstd(tar), std::string(kZstdLayer)}});
  const ConvertResult first = MustConvert("oci:" + source_ + "1", "oci:" + output_ + ":a");
  const ConvertResult second = MustConvert("oci:" + source_ + "2", "oci:" + output_ + ":b");
  EXPECT_EQ(first.layers[1].blob.digest, second.layers[0].blob.digest);
}

TEST_F(ConvertTest, LayerThatIsThereTwiceIsConvertedOnce) {
  WriteLayout(source_, "app", {PlainLayer(Files(1)), PlainLayer(Files(2)), PlainLayer(Files(1))});
  const ConvertResult result = MustConvert("oci:" + source_, "oci:" + output_);
  EXPECT_EQ(result.layers[0].blob.digest, result.layers[2].blob.digest);
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + output_), 2), ExpectedFiles(Files(1)));
}

TEST_F(ConvertTest, EmptyLayersAndNoLayers) {
  WriteLayout(source_ + "1", "app", {PlainLayer({}), PlainLayer({{"d/", "", '5'}})});
  WriteLayout(source_ + "2", "app", {});
  MustConvert("oci:" + source_ + "1", "oci:" + output_ + ":one");
  MustConvert("oci:" + source_ + "2", "oci:" + output_ + ":two");
  const Image image = MustOpen("oci:" + output_ + ":one");
  EXPECT_TRUE(ReadLayer(image, 0).empty());
  EXPECT_EQ(ReadLayer(image, 1), (std::map<std::string, std::string>{{"d/", ""}}));
  EXPECT_TRUE(MustOpen("oci:" + output_ + ":two").layers.empty());
}

TEST_F(ConvertTest, DirectoryBecomesAnImageOfOneLayer) {
  WriteFile(source_ + "/etc/name", "value");
  WriteFile(source_ + "/large", Noise(3000000, 1));
  const ConvertResult first = MustConvert("dir:" + source_, "oci:" + output_ + ":a");
  const ConvertResult second = MustConvert("dir:" + source_, "oci:" + output_ + ":b", 1);
  EXPECT_EQ(first.manifest_digest, second.manifest_digest);
  const Image image = MustOpen("oci:" + output_ + ":a");
  EXPECT_EQ(image.config.platform.ToString(), "linux/amd64");
  ASSERT_EQ(image.layers.size(), 1u);
  EXPECT_EQ(image.config.diff_ids.at(0), image.layers[0].digest);
  EXPECT_EQ(ReadLayer(image, 0),
            (std::map<std::string, std::string>{
                {"etc/", ""}, {"etc/name", "value"}, {"large", Noise(3000000, 1)}}));
}

TEST_F(ConvertTest, DestinationInsideTheDirectoryIsRefused) {
  WriteFile(source_ + "/file", "value");
  for (const std::string& layout : {source_ + "/image", source_}) {
    const auto result = Convert({.source = "dir:" + source_, .destination = "oci:" + layout});
    EXPECT_THAT(result.status().ToString(), HasSubstr("inside the directory"));
  }
  EXPECT_EQ(Snapshot(source_).size(), 1u);
}

TEST_F(ConvertTest, TreeArchivedByTarComesBackWhole) {
  const std::string tree = directory_.path() + "/tree";
  std::map<std::string, std::string> expected;
  for (uint32_t i = 0; i < 300; ++i) {
    const std::string name = fmt::format("d{}/{}file{}", i % 7, std::string(i % 120, 'n'), i);
    expected[fmt::format("d{}/", i % 7)] = "";
    expected[name] = Noise(i * i, i);
    WriteFile(tree + "/" + name, expected[name]);
  }
  RunCommand(fmt::format("tar -C {} -cf {}.tar .", tree, tree));
  const std::string tar = ReadFile(tree + ".tar");
  WriteLayout(source_, "app", {{tar, Gzip(tar), std::string(kGzipLayer)}});
  MustConvert("oci:" + source_, "oci:" + output_);
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + output_), 0), expected);
}

TEST_F(ConvertTest, WrongDiffIdIsNamedWithBothDigests) {
  const std::string tar = MakeTar(Files(1));
  const Digest wrong = Digest::Of(AsBytes("something else"));
  const oci::Descriptor layer = WriteBlob(source_, Gzip(tar), kGzipLayer);
  WriteIndex(source_, {WriteManifest(source_, MakeConfigJson({wrong}), {layer})});
  EXPECT_THAT(ConvertError("oci:" + source_),
              AllOf(HasSubstr("layer 0 (" + layer.digest.ToString()), HasSubstr("diff_id mismatch"),
                    HasSubstr(wrong.ToString()), HasSubstr(Digest::Of(AsBytes(tar)).ToString())));
}

TEST_F(ConvertTest, BytesBehindTheEndOfTheArchiveBelongToTheDiffId) {
  const std::string tar = MakeTar(Files(1)) + std::string(10240, '\0') + Noise(3 << 20, 1);
  WriteLayout(source_, "app", {{tar, Gzip(tar), std::string(kGzipLayer)}});
  MustConvert("oci:" + source_, "oci:" + output_ + ":x");
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + output_ + ":x"), 0), ExpectedFiles(Files(1)));
  WriteLayout(source_ + "2", "app", {{tar, Gzip(tar + "x"), std::string(kGzipLayer)}});
  EXPECT_THAT(ConvertError("oci:" + source_ + "2"), HasSubstr("diff_id mismatch"));
}

TEST_F(ConvertTest, DamagedLayerIsNamedWithBothDigestsWhereverTheDamageIs) {
  const std::string tar = MakeTar(Files(1));
  for (const std::string& blob : {tar, Gzip(tar), Zstd(tar)}) {
    WriteLayout(source_, "app", {{tar, blob}});
    const Digest digest = Digest::Of(AsBytes(blob));
    const std::string file = fmt::format("{}/blobs/sha256/{}", source_, digest.Hex());
    for (const size_t position : {size_t{4}, size_t{300}, blob.size() / 2, blob.size() - 1}) {
      std::string damaged = blob;
      damaged[position] ^= 0x10;
      WriteFile(file, damaged);
      EXPECT_THAT(
          ConvertError("oci:" + source_),
          AllOf(HasSubstr("layer 0"), HasSubstr("digest mismatch"), HasSubstr(digest.ToString()),
                HasSubstr(Digest::Of(AsBytes(damaged)).ToString())))
          << position;
    }
    WriteFile(file, blob.substr(0, blob.size() / 2));
    EXPECT_THAT(ConvertError("oci:" + source_), HasSubstr("its descriptor says"));
  }
}

TEST_F(ConvertTest, LayerThatIsCutShortIsAnErrorEvenIfItsDigestIsRight) {
  const std::string tar = MakeTar(Files(1));
  const std::string gzip = Gzip(tar);
  WriteLayout(source_, "app", {{tar, gzip.substr(0, gzip.size() - 100), std::string(kGzipLayer)}});
  EXPECT_THAT(ConvertError("oci:" + source_), HasSubstr("gzip: the stream ends early"));
}

TEST_F(ConvertTest, FailureInALaterLayerLeavesNothing) {
  const TestLayer good = PlainLayer(Files(1));
  const TestLayer bad = {good.tar, Gzip("not a tar archive at all" + Noise(2000, 1))};
  WriteLayout(source_, "app", {good, bad});
  EXPECT_THAT(ConvertError("oci:" + source_), HasSubstr("layer 1"));
  EXPECT_FALSE(stdfs::exists(output_));

  WriteLayout(source_ + "2", "app", {good});
  MustConvert("oci:" + source_ + "2", "oci:" + output_ + ":kept");
  EXPECT_THAT(ConvertError("oci:" + source_), HasSubstr("layer 1"));
  EXPECT_EQ(MustOpen("oci:" + output_ + ":kept").layers.size(), 1u);
}

TEST_F(ConvertTest, ImageThatIsConvertedIsNotConvertedAgain) {
  WriteLayout(source_, "app", {PlainLayer(Files(1))});
  MustConvert("oci:" + source_, "oci:" + directory_.path() + "/once:x");
  EXPECT_THAT(ConvertError("oci:" + directory_.path() + "/once:x"), HasSubstr("already converted"));
}

TEST_F(ConvertTest, ImageThatIsNotConvertedIsNotOpened) {
  WriteLayout(source_, "app", {PlainLayer(Files(1))});
  const auto image = OpenImage("oci:" + source_, {"linux", "amd64", ""});
  EXPECT_TRUE(absl::IsFailedPrecondition(image.status()));
  EXPECT_THAT(image.status().ToString(), HasSubstr("lamina convert oci:" + source_));
  EXPECT_TRUE(absl::IsNotFound(OpenImage("oci:" + output_, {"linux", "amd64", ""}).status()));
}

TEST_F(ConvertTest, FullDiskLeavesTheLayoutAsItWas) {
  if (::geteuid() != 0) GTEST_SKIP() << "mounting a small tmpfs needs root";
  stdfs::create_directory(output_);
  ASSERT_EQ(::mount("tmpfs", output_.c_str(), "tmpfs", 0, "size=1m"), 0);
  WriteLayout(source_, "app", {PlainLayer({{"a", Noise(2000000, 1)}})});
  WriteLayout(source_ + "2", "app", {PlainLayer({{"a", "small"}})});
  MustConvert("oci:" + source_ + "2", "oci:" + output_ + ":kept");
  EXPECT_THAT(ConvertError("oci:" + source_), HasSubstr("No space left"));
  EXPECT_EQ(::umount2(output_.c_str(), MNT_DETACH), 0);
}

TEST_F(ConvertTest, TwoConvertersAtOnceBothSucceed) {
  WriteLayout(source_ + "a", "app", {PlainLayer(Files(1)), PlainLayer(Files(2))});
  WriteLayout(source_ + "b", "app", {PlainLayer(Files(1)), PlainLayer(Files(3))});
  std::vector<std::thread> converters;
  for (const std::string name : {"a", "b"}) {
    converters.emplace_back(
        [this, name] { MustConvert("oci:" + source_ + name, "oci:" + output_ + ":" + name); });
  }
  for (std::thread& converter : converters) converter.join();
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + output_ + ":a"), 1), ExpectedFiles(Files(2)));
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + output_ + ":b"), 1), ExpectedFiles(Files(3)));
}

TEST_F(ConvertTest, ReportsProgressUpToTheEnd) {
  WriteLayout(source_, "app", {PlainLayer(Files(1)), PlainLayer(Files(2)), PlainLayer(Files(1))});
  std::vector<ConvertOptions::Progress> reports;
  const auto result = Convert({.source = "oci:" + source_,
                               .destination = "oci:" + output_,
                               .progress = [&](const auto& p) { reports.push_back(p); }});
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_FALSE(reports.empty());
  for (size_t i = 1; i < reports.size(); ++i) {
    EXPECT_GE(reports[i].source_bytes_read, reports[i - 1].source_bytes_read);
  }
  EXPECT_EQ(reports.back().source_bytes_read, reports.back().source_bytes);
  EXPECT_EQ(reports.back().layers, 3u);
}

TEST(LayerStreamTest, ReaderMayStopAnywhere) {
  const TemporaryDirectory directory = MakeTestDirectory();
  const std::string content = Noise(12 << 20, 1);
  WriteFile(directory.path() + "/layer", Gzip(content));
  const auto file = ByteRange::Open(directory.path() + "/layer");
  ASSERT_TRUE(file.ok()) << file.status();
  for (const size_t stop : {size_t{0}, size_t{1}, size_t{2 << 20}, content.size()}) {
    const auto stream = LayerStream::Open(*file, std::nullopt, Digest::Of(AsBytes(content)));
    ASSERT_TRUE(stream.ok()) << stream.status();
    std::vector<std::byte> buffer(100000);
    size_t total = 0;
    while (total < stop) {
      const auto size = (*stream)->Read(buffer);
      ASSERT_TRUE(size.ok()) << size.status();
      ASSERT_NE(*size, 0u);
      total += *size;
    }
  }
}

}  // namespace
}  // namespace lamina::fs
