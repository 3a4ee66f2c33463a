// SPDX-License-Identifier: Apache-2.0
#include "fs/image/decompress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using namespace std::string_view_literals;
using ::testing::HasSubstr;

// Gives the decompressor the input in pieces of `input_step` and room for `output_step` at a time.
absl::StatusOr<std::string> DecompressInSteps(Compression compression, std::string_view data,
                                              size_t input_step, size_t output_step) {
  const std::unique_ptr<Decompressor> decompressor = Decompressor::Create(compression);
  std::string result;
  std::vector<std::byte> output(output_step);
  while (!data.empty()) {
    const std::string_view piece = data.substr(0, input_step);
    data.remove_prefix(piece.size());
    std::span<const std::byte> rest = AsBytes(piece);
    for (size_t made = output.size(); !rest.empty() || made == output.size();) {
      ASSIGN_OR_RETURN(made, decompressor->Decompress(rest, output));
      result += AsText(std::span(output).first(made));
    }
  }
  RETURN_IF_ERROR(decompressor->Finish());
  return result;
}

absl::StatusOr<std::string> Decompressed(Compression compression, std::string_view data) {
  return DecompressInSteps(compression, data, kIoSize, kIoSize);
}

std::string SkippableFrame(std::string_view content) {
  std::string frame("\x5e\x2a\x4d\x18"sv);
  frame += static_cast<char>(content.size());
  frame += "\0\0\0"sv;
  return frame + std::string(content);
}

const std::string kText = [] {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += fmt::format("line {}\n", i * i);
  return text;
}();

TEST(DecompressTest, ReadsAnyNumberOfGzipMembersAtAnyStep) {
  const std::string content = kText + Noise(3000, 1) + kText;
  const std::string data =
      Gzip(kText) + Gzip("") + GzipWithOptionalFields(Noise(3000, 1)) + Gzip(kText);
  for (const size_t input_step : {size_t{1}, size_t{7}, size_t{4096}, data.size()}) {
    for (const size_t output_step : {size_t{13}, size_t{5000}, kIoSize}) {
      const auto result = DecompressInSteps(Compression::kGzip, data, input_step, output_step);
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(*result, content) << input_step << " " << output_step;
    }
  }
}

TEST(DecompressTest, IgnoresWhatFollowsTheLastGzipMember) {
  for (const std::string_view tail : {"\0"sv, "\0\0\0\0\0\0\0\0\0\0\0\0"sv, "\x1f"sv, "junk"sv}) {
    for (const size_t step : {size_t{1}, kIoSize}) {
      const auto result =
          DecompressInSteps(Compression::kGzip, Gzip("content") + std::string(tail), step, 100);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(*result, "content");
    }
  }
}

TEST(DecompressTest, RefusesGzipCutShortAnywhere) {
  const std::string data = GzipWithOptionalFields(kText.substr(0, 2000)) + Gzip("more");
  const size_t first_member = GzipWithOptionalFields(kText.substr(0, 2000)).size();
  for (size_t length = 1; length < data.size(); ++length) {
    // Between members, and a byte into the next, all that is there is complete.
    if (length == first_member || length == first_member + 1) continue;
    EXPECT_FALSE(Decompressed(Compression::kGzip, data.substr(0, length)).ok()) << length;
  }
}

TEST(DecompressTest, ChecksGzipHeaderChecksumAndLength) {
  const std::string data = GzipWithOptionalFields("content");
  const size_t header_crc = data.size() - Gzip("content").size() + 10 - 1;
  for (const size_t position : {header_crc, data.size() - 8, data.size() - 1}) {
    std::string damaged = data;
    damaged[position] ^= 1;
    EXPECT_FALSE(Decompressed(Compression::kGzip, damaged).ok()) << position;
  }
}

TEST(DecompressTest, ReadsSeveralZstdFramesAtAnyStep) {
  const std::string data = SkippableFrame("skipped") + Zstd(kText) + Zstd("") + SkippableFrame("") +
                           Zstd(Noise(200000, 2));
  for (const size_t input_step : {size_t{1}, size_t{1000}, data.size()}) {
    for (const size_t output_step : {size_t{1000}, kIoSize}) {
      const auto result = DecompressInSteps(Compression::kZstd, data, input_step, output_step);
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(*result, kText + Noise(200000, 2));
    }
  }
}

TEST(DecompressTest, RefusesZstdCutShortOrFollowedByOther) {
  const std::string data = Zstd(kText.substr(0, 3000));
  for (size_t length = 1; length < data.size(); ++length) {
    EXPECT_FALSE(Decompressed(Compression::kZstd, data.substr(0, length)).ok()) << length;
  }
  EXPECT_FALSE(Decompressed(Compression::kZstd, data + "some junk").ok());
}

TEST(DecompressTest, RefusesAZstdWindowOver128MiB) {
  // Magic, frame header descriptor 0, window descriptor for 256 MiB, then an empty last block.
  const std::string frame("\x28\xb5\x2f\xfd\x00\x90\x01\x00\x00"sv);
  const auto result = Decompressed(Compression::kZstd, frame);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("memory"));
}

class DetectTest : public ::testing::Test {
 protected:
  absl::StatusOr<Compression> Detect(std::string_view content) {
    WriteFile(path_, content);
    const auto file = ByteRange::Open(path_);
    EXPECT_TRUE(file.ok()) << file.status();
    return DetectCompression(*file);
  }

  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string path_ = directory_.path() + "/file";
};

TEST_F(DetectTest, LooksAtTheContent) {
  EXPECT_EQ(Detect("").value(), Compression::kNone);
  EXPECT_EQ(Detect(MakeTar({{"a", "b"}})).value(), Compression::kNone);
  EXPECT_EQ(Detect(Gzip("x")).value(), Compression::kGzip);
  EXPECT_EQ(Detect(Zstd("x")).value(), Compression::kZstd);
  EXPECT_EQ(Detect(SkippableFrame("x")).value(), Compression::kZstd);
  EXPECT_EQ(Detect(MakeTar({{"\x1f\x8b odd name", "b"}})).value(), Compression::kNone);
}

TEST_F(DetectTest, NamesWhatIsNotSupported) {
  EXPECT_THAT(Detect("\xfd\x37zXZ\0 and more"sv).status().ToString(), HasSubstr("xz"));
  EXPECT_THAT(Detect("BZh91AY").status().ToString(), HasSubstr("bzip2"));
  EXPECT_THAT(Detect("\x04\x22\x4d\x18 and more").status().ToString(), HasSubstr("lz4"));
}

}  // namespace
}  // namespace lamina::fs
