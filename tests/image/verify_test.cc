// SPDX-License-Identifier: Apache-2.0
#include "fs/image/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;
namespace stdfs = std::filesystem;

const oci::Platform kAmd64{"linux", "amd64", ""};

class VerifyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // The second layer shares a chunk with the first. Small, as every byte is flipped.
    WriteLayout(source_, "app",
                {PlainLayer({{"a", Noise(300, 1)}, {"b", Noise(100, 2)}}),
                 PlainLayer({{"c", Noise(300, 1)}, {"d", std::string(300000, 'x')}})});
    MustConvert("oci:" + source_, "oci:" + output_ + ":app");
  }

  absl::Status OpenAndVerify() {
    const auto image = OpenImage("oci:" + output_ + ":app", kAmd64);
    if (!image.ok()) return image.status();
    return VerifyImage(*image, nullptr);
  }
  std::string BlobPath(const Digest& digest) {
    return fmt::format("{}/blobs/sha256/{}", output_, digest.Hex());
  }

  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string source_ = directory_.path() + "/source";
  const std::string output_ = directory_.path() + "/output";
};

TEST_F(VerifyTest, GoodImagePassesAndReportsProgress) {
  const Image image = MustOpen("oci:" + output_ + ":app");
  uint64_t last = 0;
  uint64_t total = 0;
  const absl::Status status = VerifyImage(image, [&](uint64_t done, uint64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(last, total);
  EXPECT_GT(total, image.layers[0].size + image.layers[1].size);
}

TEST_F(VerifyTest, FlippedBitInAnyByteOfAnyBlobIsFound) {
  uint64_t bytes = 0;
  for (const auto& entry : stdfs::directory_iterator(output_ + "/blobs/sha256")) {
    const std::string path = entry.path().string();
    const std::string content = ReadFile(path);
    std::string damaged = content;
    for (size_t i = 0; i < content.size(); ++i) {
      damaged[i] = static_cast<char>(content[i] ^ (1 << i % 8));
      WriteFile(path, damaged);
      ASSERT_FALSE(OpenAndVerify().ok()) << path << " byte " << i;
      damaged[i] = content[i];
    }
    WriteFile(path, content);
    bytes += content.size();
  }
  EXPECT_GT(bytes, 1000u);
  EXPECT_TRUE(OpenAndVerify().ok());
}

TEST_F(VerifyTest, FlippedBitInIndexOrLayoutFileIsFoundWhereItMatters) {
  const std::string good = MustOpen("oci:" + output_ + ":app").manifest_digest.ToString();
  for (const std::string name : {"/oci-layout", "/index.json"}) {
    const std::string content = ReadFile(output_ + name);
    for (size_t i = 0; i < content.size(); ++i) {
      std::string damaged = content;
      damaged[i] = static_cast<char>(content[i] ^ 1);
      WriteFile(output_ + name, damaged);
      const auto image = OpenImage("oci:" + output_ + ":app", kAmd64);
      // What opens all the same is the same image.
      if (image.ok()) {
        EXPECT_EQ(image->manifest_digest.ToString(), good) << i;
        EXPECT_TRUE(VerifyImage(*image, nullptr).ok());
      }
    }
    WriteFile(output_ + name, content);
  }
}

TEST_F(VerifyTest, NamesTheFirstFrameThatIsWrong) {
  const Image image = MustOpen("oci:" + output_ + ":app");
  const std::string path = BlobPath(image.layers[1].digest);
  std::string content = ReadFile(path);
  content[100] ^= 1;
  WriteFile(path, content);
  EXPECT_THAT(OpenAndVerify().ToString(),
              HasSubstr(fmt::format("layer 1 {}: frame 0 at offset 0: digest",
                                    image.layers[1].digest.ToString())));
}

TEST_F(VerifyTest, MissingOrShortBlobIsNamed) {
  const Image image = MustOpen("oci:" + output_ + ":app");
  const std::string path = BlobPath(image.layers[0].digest);
  stdfs::resize_file(path, image.layers[0].size - 1);
  EXPECT_THAT(OpenAndVerify().ToString(), HasSubstr("layer 0"));
  stdfs::remove(path);
  EXPECT_THAT(OpenAndVerify().ToString(), HasSubstr("layer 0"));
}

TEST_F(VerifyTest, InspectCountsWhatIsThere) {
  const auto reports = InspectImage(MustOpen("oci:" + output_ + ":app"));
  ASSERT_TRUE(reports.ok()) << reports.status();
  ASSERT_EQ(reports->size(), 2u);
  EXPECT_EQ((*reports)[0].files, 3u);
  EXPECT_EQ((*reports)[0].chunks, 2u);
  EXPECT_EQ((*reports)[0].content_bytes, 400u);
  EXPECT_EQ((*reports)[0].chunks_in_lower_layers, 0u);
  EXPECT_EQ((*reports)[1].chunks_in_lower_layers, 1u);
  EXPECT_EQ((*reports)[1].content_bytes, 300300u);
  EXPECT_GT((*reports)[1].metadata_bytes, 0u);
}

}  // namespace
}  // namespace lamina::fs
