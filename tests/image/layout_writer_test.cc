// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layout_writer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "fs/image/layout.h"
#include "tests/image/image_testing.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;
namespace stdfs = std::filesystem;

// Adds an "image" that is one document, under `tag`.
absl::Status AddImage(const std::string& layout, const std::string& tag,
                      const std::string& content) {
  ASSIGN_OR_RETURN(const auto writer, LayoutWriter::Create(layout));
  RETURN_IF_ERROR(writer->AddDocument(content));
  return writer->Commit({.media_type = std::string(oci::kManifestType),
                         .digest = Digest::Of(AsBytes(content)),
                         .size = content.size(),
                         .annotations = {{std::string(oci::kRefNameKey), tag}}});
}

std::string ReadImage(const std::string& layout, const std::string& tag) {
  const auto opened = Layout::OpenDirectory(layout);
  EXPECT_TRUE(opened.ok()) << opened.status();
  const auto manifest = FindManifest(*opened, tag, {"linux", "amd64", ""});
  EXPECT_TRUE(manifest.ok()) << manifest.status();
  return manifest.ok() ? opened->ReadDocument(*manifest, "manifest").value() : "";
}

int CountStaging(const std::string& directory) {
  int count = 0;
  for (const auto& entry : stdfs::directory_iterator(directory)) {
    count += entry.path().filename().string().starts_with(kStagingPrefix);
  }
  return count;
}

class LayoutWriterTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory_ = MakeTestDirectory();
  const std::string layout_ = directory_.path() + "/layout";
};

TEST_F(LayoutWriterTest, MakesANewLayoutAndLeavesNothingBeside) {
  ASSERT_TRUE(AddImage(layout_ + "/", "a", "content").ok());
  EXPECT_EQ(ReadImage(layout_, "a"), "content");
  EXPECT_EQ(CountStaging(directory_.path()), 0);
  EXPECT_EQ(CountStaging(layout_), 0);
  EXPECT_EQ(stdfs::status(layout_).permissions() & stdfs::perms::others_read,
            stdfs::perms::others_read);
}

TEST_F(LayoutWriterTest, FillsADirectoryThatIsEmpty) {
  stdfs::create_directory(layout_);
  ASSERT_TRUE(AddImage(layout_, "a", "content").ok());
  EXPECT_EQ(ReadImage(layout_, "a"), "content");
  EXPECT_EQ(CountStaging(layout_), 0);
}

TEST_F(LayoutWriterTest, KeepsOtherTagsAndReplacesItsOwn) {
  ASSERT_TRUE(AddImage(layout_, "a", "first").ok());
  ASSERT_TRUE(AddImage(layout_, "b", "second").ok());
  ASSERT_TRUE(AddImage(layout_, "a", "third").ok());
  EXPECT_EQ(ReadImage(layout_, "a"), "third");
  EXPECT_EQ(ReadImage(layout_, "b"), "second");
}

TEST_F(LayoutWriterTest, RefusesADirectoryOfOtherThings) {
  WriteFile(layout_ + "/thesis.txt", "precious");
  EXPECT_TRUE(absl::IsFailedPrecondition(AddImage(layout_, "a", "x")));
  WriteFile(directory_.path() + "/file", "");
  EXPECT_FALSE(AddImage(directory_.path() + "/file", "a", "x").ok());
  EXPECT_FALSE(AddImage(directory_.path() + "/no/parent", "a", "x").ok());
}

TEST_F(LayoutWriterTest, WithoutCommitNothingChanges) {
  ASSERT_TRUE(AddImage(layout_, "a", "content").ok());
  const auto before = Snapshot(directory_.path());
  for (const std::string& path : {layout_, directory_.path() + "/other"}) {
    const auto writer = LayoutWriter::Create(path);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE((*writer)->AddDocument("new").ok());
  }
  EXPECT_EQ(Snapshot(directory_.path()), before);
}

TEST_F(LayoutWriterTest, FailedCommitTakesBackItsBlobs) {
  ASSERT_TRUE(AddImage(layout_, "a", "content").ok());
  WriteFile(layout_ + "/index.json", "not an index");
  const auto before = Snapshot(directory_.path());
  EXPECT_FALSE(AddImage(layout_, "b", "new").ok());
  EXPECT_EQ(Snapshot(directory_.path()), before);

  // An index that cannot be replaced: only after the blobs are in place does this show.
  stdfs::remove(layout_ + "/index.json");
  stdfs::create_directories(layout_ + "/index.json/x");
  const auto blobs = Snapshot(layout_ + "/blobs");
  EXPECT_FALSE(AddImage(layout_, "b", "new").ok());
  EXPECT_EQ(Snapshot(layout_ + "/blobs"), blobs);
}

TEST_F(LayoutWriterTest, MendsADamagedBlob) {
  ASSERT_TRUE(AddImage(layout_, "a", "content").ok());
  WriteFile(fmt::format("{}/blobs/sha256/{}", layout_, Digest::Of(AsBytes("content")).Hex()), "c");
  ASSERT_TRUE(AddImage(layout_, "a", "content").ok());
  EXPECT_EQ(ReadImage(layout_, "a"), "content");
}

TEST_F(LayoutWriterTest, RemovesStagingOfTheDeadAndNotOfTheLiving) {
  ASSERT_TRUE(AddImage(layout_, "a", "content").ok());
  WriteFile(layout_ + "/.lamina-tmp-dead01/lock", "");
  WriteFile(layout_ + "/.lamina-tmp-dead01/layout/blobs/sha256/x", "half");
  stdfs::create_directory(layout_ + "/.lamina-tmp-dead02");
  // Killed while it removed what it had staged: the lock went first.
  WriteFile(layout_ + "/.lamina-tmp-dead03/0", "half");
  const auto living = LayoutWriter::Create(layout_);
  ASSERT_TRUE(living.ok()) << living.status();
  EXPECT_EQ(CountStaging(layout_), 1);
  ASSERT_TRUE(AddImage(layout_, "b", "other").ok());
  EXPECT_EQ(CountStaging(layout_), 1);
  EXPECT_TRUE((*living)->AddDocument("still works").ok());
}

TEST_F(LayoutWriterTest, ManyWritersAtOnceAllSucceed) {
  for (const bool exists : {false, true}) {
    const std::string layout = fmt::format("{}-{}", layout_, exists);
    if (exists) stdfs::create_directory(layout);
    std::vector<std::thread> writers;
    for (int i = 0; i < 8; ++i) {
      writers.emplace_back([&, i] {
        const absl::Status status = AddImage(layout, fmt::format("t{}", i), fmt::format("c{}", i));
        EXPECT_TRUE(status.ok()) << status;
      });
    }
    for (std::thread& writer : writers) writer.join();
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(ReadImage(layout, fmt::format("t{}", i)), fmt::format("c{}", i));
    }
    EXPECT_EQ(CountStaging(layout), 0);
  }
  EXPECT_EQ(CountStaging(directory_.path()), 0);
}

// Mounted on a directory for as long as the object lives.
class SmallTmpfs {
 public:
  explicit SmallTmpfs(std::string path) : path_(std::move(path)) {
    stdfs::create_directories(path_);
    mounted_ = ::mount("tmpfs", path_.c_str(), "tmpfs", 0, "size=1m") == 0;
  }
  ~SmallTmpfs() {
    if (mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }

 private:
  std::string path_;
  bool mounted_ = false;
};

TEST_F(LayoutWriterTest, FullDiskLeavesTheLayoutAsItWas) {
  if (::geteuid() != 0) GTEST_SKIP() << "mounting a small tmpfs needs root";
  const SmallTmpfs disk(layout_);
  ASSERT_TRUE(disk.mounted());
  ASSERT_TRUE(AddImage(layout_, "a", Noise(300000, 1)).ok());
  const auto before = Snapshot(layout_);
  const absl::Status status = AddImage(layout_, "b", Noise(900000, 2));
  EXPECT_THAT(status.ToString(), HasSubstr("No space left"));
  EXPECT_EQ(Snapshot(layout_), before);
  EXPECT_TRUE(AddImage(layout_, "b", Noise(300000, 2)).ok());
}

}  // namespace
}  // namespace lamina::fs
