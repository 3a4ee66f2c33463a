// SPDX-License-Identifier: Apache-2.0
#include "fs/image/tar_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;

class TarIndexTest : public ::testing::Test {
 protected:
  absl::StatusOr<TarIndex> Index(std::string_view content) {
    WriteFile(path_, content);
    return TarIndex::Open(path_);
  }
  static std::string Content(const TarIndex& index, std::string_view name) {
    const auto member = index.Find(name);
    EXPECT_TRUE(member.ok()) << member.status();
    return member.ok() ? member->ReadAll(1 << 20).value() : "";
  }

  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string path_ = directory_.path() + "/archive.tar";
};

TEST_F(TarIndexTest, FindsMembersAndFollowsLinks) {
  const auto index = Index(MakeTar({{"./a/layer.tar", "first"},
                                    {"b/layer.tar", "", '2', "../a/layer.tar"},
                                    {"c/layer.tar", "", '1', "b/layer.tar"},
                                    {"d/", "", '5'},
                                    {"again", "old"},
                                    {"again", "new"}}));
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(Content(*index, "a/layer.tar"), "first");
  EXPECT_EQ(Content(*index, "b/layer.tar"), "first");
  EXPECT_EQ(Content(*index, "./c//layer.tar"), "first");
  EXPECT_EQ(Content(*index, "again"), "new");
  EXPECT_TRUE(absl::IsNotFound(index->Find("d").status()));
}

TEST_F(TarIndexTest, LinksThatLeadNowhereAreNotFound) {
  const auto index = Index(MakeTar({{"loop", "", '2', "loop"},
                                    {"out", "", '2', "../../../etc/passwd"},
                                    {"absent", "", '1', "not-there"},
                                    {"../outside", "x"}}));
  ASSERT_TRUE(index.ok()) << index.status();
  for (const char* name : {"loop", "out", "absent", "outside", "../outside", "/etc/passwd", ""}) {
    EXPECT_TRUE(absl::IsNotFound(index->Find(name).status())) << name;
  }
}

TEST_F(TarIndexTest, ReadsWhatTarProgramsWrite) {
  const std::string tree = directory_.path() + "/tree";
  const std::string long_name = std::string(120, 'n') + "/" + std::string(200, 'm');
  WriteFile(tree + "/" + long_name, "content");
  for (const char* format : {"gnu", "pax", "ustar", "oldgnu"}) {
    // ustar has no room for this name.
    const bool fits = std::string_view(format) != "ustar";
    if (!fits) std::filesystem::remove_all(tree + "/" + std::string(120, 'n'));
    WriteFile(tree + "/short", "s");
    RunCommand(fmt::format("tar -C {} --format={} -cf {} .", tree, format, path_));
    const auto index = TarIndex::Open(path_);
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(Content(*index, "short"), "s");
    if (fits) {
      EXPECT_EQ(Content(*index, long_name), "content") << format;
    } else {
      WriteFile(tree + "/" + long_name, "content");
    }
  }
}

TEST_F(TarIndexTest, ReadsCompressedArchives) {
  const std::string tar = MakeTar({{"a", Noise(3 << 20, 1)}, {"b", "content"}});
  for (const std::string& archive : {Gzip(tar), Zstd(tar)}) {
    const auto index = Index(archive);
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(Content(*index, "b"), "content");
  }
}

TEST_F(TarIndexTest, DecompressesNoMoreThanTheArchive) {
  std::string tar = MakeTar({{"b", "content"}});
  tar += Noise(1 << 20, 1) + std::string(64 << 20, '\0');
  const std::string whole = Zstd(tar);
  // What is behind the end of the archive is not looked at, whether it is there or not.
  for (const std::string& archive : {whole, whole.substr(0, whole.size() - 100)}) {
    const auto index = Index(archive);
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(Content(*index, "b"), "content");
  }
}

TEST_F(TarIndexTest, RefusesABombBeforeItIsAllThere) {
  // 8 GiB of zeros in a member of that size: frames of 64 MiB, repeated.
  std::string tar = MakeTar({{"zeros", ""}});
  tar.replace(124, 12, std::string("\x80\0\0\0\0\0\0\2\0\0\0\0", 12));
  std::fill_n(tar.begin() + 148, 8, ' ');
  uint64_t sum = 0;
  for (size_t i = 0; i < 512; ++i) sum += static_cast<uint8_t>(tar[i]);
  tar.replace(148, 8, fmt::format("{:06o}", sum) + std::string("\0 ", 2));
  std::string archive = Zstd(tar.substr(0, 512));
  const std::string frame = Zstd(std::string(64 << 20, '\0'));
  for (int i = 0; i < 128; ++i) archive += frame;
  const absl::Status status = Index(archive).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.ToString(), HasSubstr("more than 268435456 bytes come out of"));
}

TEST_F(TarIndexTest, ErrorsAboutTheTemporaryFileNameTheVariable) {
  ::setenv("TMPDIR", "/nonexistent", 1);
  const absl::Status status = Index(Gzip(MakeTar({{"b", "content"}}))).status();
  ::unsetenv("TMPDIR");
  EXPECT_THAT(status.ToString(), HasSubstr("temporary file in /nonexistent (TMPDIR"));
}

TEST_F(TarIndexTest, RefusesWhatIsNotAWholeArchive) {
  const std::string tar = MakeTar({{"a", Noise(1000, 1)}});
  EXPECT_FALSE(Index("").ok());
  EXPECT_FALSE(Index(std::string(2000, 'x')).ok());
  for (const size_t length : {size_t{100}, size_t{512}, size_t{1000}, size_t{1500}}) {
    EXPECT_FALSE(Index(tar.substr(0, length)).ok()) << length;
  }
  std::string damaged = tar;
  damaged[0] = 'b';
  EXPECT_THAT(Index(damaged).status().ToString(), HasSubstr("checksum"));
  EXPECT_FALSE(Index(Gzip(tar).substr(0, 500)).ok());
}

}  // namespace
}  // namespace lamina::fs
