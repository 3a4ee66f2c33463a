// SPDX-License-Identifier: Apache-2.0
//
// Images made by skopeo and umoci are read, and ours are by them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "fs/image/verify.h"
#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;
namespace stdfs = std::filesystem;

class InteroperabilityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* tool : {"skopeo", "umoci"}) {
      ASSERT_TRUE(stdfs::exists(fmt::format("/usr/bin/{}", tool))) << tool << " is needed";
    }
    WriteFile(tree_ + "/etc/name", "value");
    WriteFile(tree_ + "/large", Noise(2000000, 1));
    expected_ = {{"etc/", ""}, {"etc/name", "value"}, {"large", Noise(2000000, 1)}};
    const std::string umoci = "umoci --log=error ";
    RunCommand(umoci + "init --layout " + source_);
    RunCommand(umoci + "new --image " + source_ + ":app");
    RunCommand(umoci + fmt::format("insert --image {}:app {} /", source_, tree_));
  }
  static std::string Skopeo(const std::string& arguments) {
    return RunCommand("skopeo --insecure-policy " + arguments);
  }

  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string tree_ = directory_.path() + "/tree";
  const std::string source_ = directory_.path() + "/source";
  const std::string output_ = directory_.path() + "/output";
  std::map<std::string, std::string> expected_;
};

TEST_F(InteroperabilityTest, ImageOfUmociIsConvertedAndSkopeoReadsTheResult) {
  MustConvert("oci:" + source_ + ":app", "oci:" + output_ + ":app");
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + output_ + ":app"), 0), expected_);
  EXPECT_THAT(Skopeo("inspect --raw oci:" + output_ + ":app"), HasSubstr(oci::kLaminaLayerType));
  EXPECT_EQ(Skopeo("inspect --config --raw oci:" + output_ + ":app"),
            Skopeo("inspect --config --raw oci:" + source_ + ":app"));
}

TEST_F(InteroperabilityTest, CopyBySkopeoIsTheSameImage) {
  const ConvertResult result = MustConvert("oci:" + source_ + ":app", "oci:" + output_ + ":app");
  const std::string copy = directory_.path() + "/copy";
  Skopeo(fmt::format("copy -q oci:{}:app oci:{}:app", output_, copy));
  const Image image = MustOpen("oci:" + copy + ":app");
  EXPECT_EQ(image.manifest_digest, result.manifest_digest);
  const absl::Status status = VerifyImage(image, nullptr);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(InteroperabilityTest, ArchivesOfSkopeoAreConvertedInPlace) {
  const std::string docker = directory_.path() + "/docker.tar";
  const std::string oci = directory_.path() + "/oci.tar";
  Skopeo(fmt::format("copy -q oci:{}:app docker-archive:{}:example.org/app:1", source_, docker));
  Skopeo(fmt::format("copy -q oci:{}:app oci-archive:{}:app", source_, oci));
  RunCommand(fmt::format("gzip -k {}", docker));
  for (const std::string& source :
       {"docker-archive:" + docker, "docker-archive:" + docker + ":example.org/app:1",
        "docker-archive:" + docker + ".gz", "oci-archive:" + oci, "oci-archive:" + oci + ":app"}) {
    MustConvert(source, "oci:" + output_ + ":app");
    EXPECT_EQ(ReadLayer(MustOpen("oci:" + output_ + ":app"), 0), expected_) << source;
  }
}

TEST_F(InteroperabilityTest, TagsOfUmociAreKeptAndUmociSeesOurs) {
  MustConvert("oci:" + source_ + ":app", "oci:" + source_ + ":app-lamina");
  const std::string tags = RunCommand("umoci --log=error ls --layout " + source_);
  EXPECT_EQ(tags, "app\napp-lamina\n");
  EXPECT_EQ(ReadLayer(MustOpen("oci:" + source_ + ":app-lamina"), 0), expected_);
}

}  // namespace
}  // namespace lamina::fs
