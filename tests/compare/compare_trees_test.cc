// SPDX-License-Identifier: Apache-2.0
//
// Each kind of difference is made between two otherwise equal trees, and must be the one found.
#include "tests/compare/compare_trees.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "chunkstore/base/file.h"
#include "tests/compare/file_view.h"

namespace lamina::compare {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CompareTreesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto directory = TemporaryDirectory::Create(::testing::TempDir(), "compare");
    ASSERT_TRUE(directory.ok()) << directory.status();
    directory_.emplace(*std::move(directory));
    for (const std::string& side : {left(), right()}) {
      std::filesystem::create_directories(side + "/d/sub");
      Write(side + "/d/file", "content");
      std::filesystem::create_hard_link(side + "/d/file", side + "/linked");
      Write(side + "/other", "more");
      std::filesystem::create_symlink("d/file", side + "/link");
      ASSERT_EQ(mkfifo((side + "/fifo").c_str(), 0644), 0);
      SetTimes(side);
    }
  }

  std::string left() const { return directory_->path() + "/left"; }
  std::string right() const { return directory_->path() + "/right"; }

  static void Write(const std::string& path, std::string_view content) {
    std::ofstream(path, std::ios::binary) << content;
  }

  // The same time for everything, so that only what a test changes differs.
  static void SetTimes(const std::string& root) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
      SetTime(entry.path(), {1000, 5});
    }
    SetTime(root, {1000, 5});
  }
  static void SetTime(const std::string& path, timespec time) {
    const timespec times[2] = {time, time};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
  }

  // The differences after a change that also touched directories' mtimes, which are made equal
  // again.
  std::vector<std::string> Differences(CompareOptions options = {}) {
    SetTimes(left());
    SetTimes(right());
    return DifferencesAsIs(std::move(options));
  }
  std::vector<std::string> DifferencesAsIs(CompareOptions options = {}) {
    const auto comparison = CompareTrees(left(), right(), options);
    EXPECT_TRUE(comparison.ok()) << comparison.status();
    return comparison.ok() ? comparison->differences : std::vector<std::string>{"failed"};
  }

  std::optional<TemporaryDirectory> directory_;
};

TEST_F(CompareTreesTest, EqualTreesHaveNoDifferences) {
  const auto comparison = CompareTrees(left(), right(), {});
  ASSERT_TRUE(comparison.ok()) << comparison.status();
  EXPECT_THAT(comparison->differences, IsEmpty());
  EXPECT_EQ(comparison->entries, 8u);  // the root, d, d/file, d/sub, fifo, link, linked, other
  EXPECT_EQ(comparison->bytes, 11u);   // content once for both names, more
}

TEST_F(CompareTreesTest, FindsNamesOfOneSide) {
  Write(left() + "/d/extra", "");
  Write(right() + "/d/sub/\xff\n", "");
  EXPECT_THAT(Differences(),
              ElementsAre("/d/extra: is only left", "/d/sub/\\xff\\x0a: is only right"));
}

TEST_F(CompareTreesTest, FindsAnotherType) {
  std::filesystem::remove(right() + "/other");
  std::filesystem::create_directory(right() + "/other");
  EXPECT_THAT(Differences(), ElementsAre("/other: type is regular file left, directory right"));
}

TEST_F(CompareTreesTest, FindsAnotherMode) {
  ASSERT_EQ(chmod((right() + "/other").c_str(), 04644), 0);
  EXPECT_THAT(Differences(), ElementsAre("/other: mode is 0644 left, 4644 right"));
}

TEST_F(CompareTreesTest, FindsAnotherOwner) {
  if (geteuid() != 0) GTEST_SKIP() << "chown needs root";
  ASSERT_EQ(lchown((right() + "/link").c_str(), 70000, 3), 0);
  EXPECT_THAT(Differences(),
              ElementsAre("/link: uid is 0 left, 70000 right", "/link: gid is 0 left, 3 right"));
}

TEST_F(CompareTreesTest, FindsAnotherMtimeDownToTheNanosecond) {
  SetTime(right() + "/link", {1000, 6});
  EXPECT_THAT(DifferencesAsIs(),
              ElementsAre("/link: mtime is 1000.000000005 left, 1000.000000006 right"));
}

TEST_F(CompareTreesTest, FindsAnotherMtimeOfADirectoryUnlessItIsIgnored) {
  SetTime(right() + "/d", {-1, 0});
  EXPECT_THAT(DifferencesAsIs(),
              ElementsAre("/d: mtime is 1000.000000005 left, -1.000000000 right"));
  EXPECT_THAT(DifferencesAsIs({.ignored = {Property::kDirectoryMtime}}), IsEmpty());
}

TEST_F(CompareTreesTest, FindsAnotherSize) {
  Write(right() + "/other", "mor");
  EXPECT_THAT(Differences(), ElementsAre("/other: size is 4 left, 3 right"));
}

TEST_F(CompareTreesTest, FindsOtherContent) {
  Write(right() + "/other", "mOre");
  EXPECT_THAT(Differences(),
              ElementsAre("/other: content differs at byte 1: 0x6f left, 0x4f right"));
}

TEST_F(CompareTreesTest, FindsOtherContentBehindTheFirstBuffer) {
  std::string content(3 << 20, 'x');
  Write(left() + "/other", content);
  content[(2 << 20) + 7] = 'y';
  Write(right() + "/other", content);
  EXPECT_THAT(Differences(),
              ElementsAre("/other: content differs at byte 2097159: 0x78 left, 0x79 right"));
}

TEST_F(CompareTreesTest, FindsAnotherLinkTarget) {
  std::filesystem::remove(right() + "/link");
  std::filesystem::create_symlink("d/sub", right() + "/link");
  EXPECT_THAT(Differences(), ElementsAre("/link: size is 6 left, 5 right",
                                         "/link: target is d/file left, d/sub right"));
}

TEST_F(CompareTreesTest, FindsABrokenHardLink) {
  std::filesystem::remove(right() + "/linked");
  Write(right() + "/linked", "content");
  EXPECT_THAT(Differences(),
              ElementsAre("/d/file: link count is 2 left, 1 right",
                          "/linked: link count is 2 left, 1 right",
                          "/linked: first name of the inode is /d/file left, /linked right"));
}

TEST_F(CompareTreesTest, FindsNamesThatAreLinkedToAnotherInodeOfEqualContent) {
  for (const std::string& side : {left(), right()}) {
    Write(side + "/twin", "content");
    std::filesystem::create_hard_link(side + "/twin", side + "/twin2");
  }
  std::filesystem::remove(right() + "/linked");
  std::filesystem::remove(right() + "/twin2");
  std::filesystem::create_hard_link(right() + "/twin", right() + "/linked");
  std::filesystem::create_hard_link(right() + "/d/file", right() + "/twin2");
  EXPECT_THAT(Differences(),
              ElementsAre("/linked: first name of the inode is /d/file left, /linked right",
                          "/twin: first name of the inode is /twin left, /linked right",
                          "/twin2: first name of the inode is /twin left, /d/file right"));
}

TEST_F(CompareTreesTest, FindsAnotherDeviceNumber) {
  if (geteuid() != 0) GTEST_SKIP() << "mknod needs root";
  ASSERT_EQ(mknod((left() + "/null").c_str(), S_IFCHR | 0600, makedev(1, 3)), 0);
  ASSERT_EQ(mknod((right() + "/null").c_str(), S_IFCHR | 0600, makedev(1, 300)), 0);
  EXPECT_THAT(Differences(), ElementsAre("/null: device is 1:3 left, 1:300 right"));
}

TEST_F(CompareTreesTest, FindsXattrsThatDifferInNameOrValue) {
  const auto set = [](const std::string& path, const char* name, std::string_view value) {
    ASSERT_EQ(lsetxattr(path.c_str(), name, value.data(), value.size(), 0), 0) << strerror(errno);
  };
  set(left() + "/other", "user.left", "1");
  set(left() + "/other", "user.both", std::string_view("a\0b", 3));
  set(right() + "/other", "user.both", std::string_view("a\0c", 3));
  set(right() + "/other", "user.right", "");
  EXPECT_THAT(Differences(), ElementsAre("/other: xattr user.both is a\\x00b left, a\\x00c right",
                                         "/other: xattr user.left is only left",
                                         "/other: xattr user.right is only right"));
  EXPECT_THAT(Differences({.ignored = {Property::kXattrs}}), IsEmpty());
}

TEST_F(CompareTreesTest, SeesPrivilegedXattrsOfSymbolicLinks) {
  if (geteuid() != 0) GTEST_SKIP() << "trusted.* needs root";
  ASSERT_EQ(lsetxattr((left() + "/link").c_str(), "trusted.t", "x", 1, 0), 0) << strerror(errno);
  EXPECT_THAT(Differences(), ElementsAre("/link: xattr trusted.t is only left"));
}

TEST_F(CompareTreesTest, AHoleEqualsStoredZerosAndOtherDataIsFoundInIt) {
  const std::string zeros(1 << 20, '\0');
  Write(left() + "/sparse", "x");
  ASSERT_EQ(truncate((left() + "/sparse").c_str(), 1 << 20), 0);
  Write(right() + "/sparse", "x" + zeros.substr(1));
  EXPECT_THAT(Differences(), IsEmpty());
  std::string other = "x" + zeros.substr(1);
  other[700000] = 'y';
  Write(right() + "/sparse", other);
  EXPECT_THAT(Differences(),
              ElementsAre("/sparse: content differs at byte 700000: 0x00 left, 0x79 right"));
}

TEST_F(CompareTreesTest, ComparesHugeSparseFilesByTheirData) {
  for (const std::string& side : {left(), right()}) {
    const UniqueFd file(open((side + "/huge").c_str(), O_CREAT | O_WRONLY, 0644));
    ASSERT_EQ(ftruncate(file.get(), int64_t{1} << 40), 0);
    ASSERT_EQ(pwrite(file.get(), "end", 3, (int64_t{1} << 39) + 5), 3);
  }
  SetTimes(left());
  SetTimes(right());
  const auto comparison = CompareTrees(left(), right(), {});
  ASSERT_TRUE(comparison.ok()) << comparison.status();
  EXPECT_THAT(comparison->differences, IsEmpty());
  EXPECT_LT(comparison->bytes, 1u << 20);
}

TEST_F(CompareTreesTest, EndsAfterTheDifferencesThatWereAskedFor) {
  for (int i = 0; i < 30; ++i) Write(left() + "/extra" + std::to_string(i), "");
  EXPECT_EQ(Differences({.max_differences = 3}).size(), 3u);
}

TEST_F(CompareTreesTest, WalksPathsThatAreLongerThanTheSystemTakes) {
  const std::string name(200, 'n');
  for (const std::string& side : {left(), right()}) {
    UniqueFd directory(open(side.c_str(), O_DIRECTORY));
    for (int level = 0; level < 30; ++level) {
      ASSERT_EQ(mkdirat(directory.get(), name.c_str(), 0755), 0);
      directory = UniqueFd(openat(directory.get(), name.c_str(), O_DIRECTORY));
    }
    const UniqueFd file(openat(directory.get(), "deep", O_CREAT | O_WRONLY, 0644));
    ASSERT_EQ(write(file.get(), side.data() + side.size() - 4, 4), 4);
  }
  const auto differences =
      DifferencesAsIs({.ignored = {Property::kDirectoryMtime, Property::kMtime}});
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_THAT(differences[0], HasSubstr("content differs at byte 0"));
}

TEST_F(CompareTreesTest, SaysWhichTreeCannotBeRead) {
  const auto comparison = CompareTrees(left(), right() + "/nothing", {});
  ASSERT_FALSE(comparison.ok());
  EXPECT_THAT(std::string(comparison.status().message()), HasSubstr("right"));
}

TEST(SegmentsTest, UnionJoinsRangesThatTouch) {
  EXPECT_THAT(Union({{0, 10}, {30, 40}}, {{10, 20}, {35, 50}}),
              ElementsAre(Range{0, 20}, Range{30, 50}));
}

TEST(PropertyTest, UnknownNamesAreRefused) {
  EXPECT_EQ(*ParseProperty("directory-mtime"), Property::kDirectoryMtime);
  EXPECT_FALSE(ParseProperty("atime").ok());
}

}  // namespace
}  // namespace lamina::compare
