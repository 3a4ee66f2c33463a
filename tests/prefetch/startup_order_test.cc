// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/startup_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <stop_token>

#include "chunkstore/base/file.h"
#include "fs/image/convert.h"
#include "fs/image/image.h"
#include "fs/prefetch/image_paths.h"
#include "tests/chunkstore/blob_testing.h"

namespace lamina::fs {
namespace {

namespace stdfs = std::filesystem;
using chunkstore::Blob;

// An image of one layer from files made here, each of which has frames of its own.
class StartupOrderTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::make_unique<TemporaryDirectory>(
        TemporaryDirectory::Create(testing::TempDir(), "lamina-startup-").value());
  }
  std::string root() const { return directory_->path() + "/root"; }
  // Larger than a frame, so that it shares none.
  void Add(const std::string& path, const std::string& start) {
    stdfs::create_directories(stdfs::path(root() + path).parent_path());
    const std::string content =
        start + chunkstore::RandomBytes((300 << 10) - start.size() % 4096, files_++);
    ASSERT_TRUE(WriteFileAtomically(root() + path, content, 0755).ok());
  }
  void Link(const std::string& target, const std::string& path) {
    stdfs::create_directories(stdfs::path(root() + path).parent_path());
    stdfs::create_symlink(target, root() + path);
  }
  // Converts it, and gives the files that the order names.
  std::vector<std::string> Order(const oci::ImageConfig& config, const std::stop_token& stop = {}) {
    const std::string reference = "oci:" + directory_->path() + "/image:t";
    EXPECT_TRUE(Convert({.source = "dir:" + root(), .destination = reference}).ok());
    const Image image = OpenImage(reference, oci::Platform::Host()).value();
    auto store = chunkstore::BlobStore::Open({.directory = directory_->path() + "/state"}).value();
    const std::vector<std::shared_ptr<Blob>> blobs = {
        store->Attach(image.layers[0], image.origin).value()};
    const auto reader = erofs::Reader::Open(blobs[0]->metadata()).value();
    const StartupFrames frames =
        StartupOrder(reader, blobs, config, std::make_shared<chunkstore::ReadStats>(), stop);
    neighbours_.clear();
    AddFilesOf(reader, *blobs[0], frames.neighbours, neighbours_);
    std::vector<std::string> files;
    AddFilesOf(reader, *blobs[0], frames.opened, files);
    return files;
  }
  void AddFilesOf(const erofs::Reader& reader, const Blob& blob,
                  const std::vector<chunkstore::Touch>& touches, std::vector<std::string>& files) {
    for (const chunkstore::Touch& touch : touches) {
      const std::string file = FileOf(reader, blob.frames()[touch.frame].first_block);
      if (files.empty() || files.back() != file) files.push_back(file);
    }
  }
  std::string FileOf(const erofs::Reader& reader, uint32_t block) {
    for (const auto& entry : stdfs::recursive_directory_iterator(root())) {
      if (entry.is_symlink() || !entry.is_regular_file()) continue;
      const std::string path = entry.path().string().substr(root().size());
      const auto found = FindFile(reader, path);
      if (!found.ok()) continue;
      const std::vector<erofs::Extent> extents = reader.ReadExtents(found->inode).value();
      for (const erofs::Extent& extent : extents) {
        if (block >= extent.block && block < extent.block + (extent.length + 4095) / 4096) {
          return path;
        }
      }
    }
    return "?";
  }

  std::unique_ptr<TemporaryDirectory> directory_;
  uint64_t files_ = 1;
  std::vector<std::string> neighbours_;  // of the last Order()
};

TEST_F(StartupOrderTest, ScriptThenItsInterpreterThenItsArguments) {
  Add("/app/main", "#!/usr/bin/env tool\n");
  Add("/usr/bin/env", "plain\n");
  Add("/opt/bin/tool", "plain\n");
  Add("/etc/app.conf", "plain\n");
  Add("/other", "plain\n");
  EXPECT_THAT(Order({.entrypoint = {"main"},
                     .command = {"--config", "/etc/app.conf"},
                     .environment = {"A=b", "PATH=/nothing:/opt/bin:/app:/usr/bin"}}),
              testing::ElementsAre("/app/main", "/usr/bin/env", "/opt/bin/tool", "/etc/app.conf"));
}

TEST_F(StartupOrderTest, ProgramThenItsLoaderAndLibraries) {
  const std::string ls = ReadFileToString("/bin/ls", 1 << 24).value();
  Add("/usr/bin/ls", ls);
  Link("usr/lib64", "/lib64");
  Add("/usr/lib/x86_64-linux-gnu/libc.so.6", "plain\n");
  Add("/usr/lib64/ld-linux-x86-64.so.2", "plain\n");
  const std::vector<std::string> files = Order({.command = {"ls"}});
#if defined(__x86_64__)
  ASSERT_GE(files.size(), 3u);
  EXPECT_EQ(files[0], "/usr/bin/ls");
  EXPECT_EQ(files[1], "/usr/lib64/ld-linux-x86-64.so.2");
  EXPECT_THAT(files, testing::Contains("/usr/lib/x86_64-linux-gnu/libc.so.6"));
#endif
}

TEST_F(StartupOrderTest, ThenFilesBesideTheArgumentsAndFramesBeside) {
  for (const char* path : {"/a/first", "/a/program", "/a/second", "/a/third", "/b/main",
                           "/b/module", "/c/far", "/c/further"}) {
    Add(path, "plain\n");
  }
  EXPECT_THAT(Order({.entrypoint = {"/a/program"}, .command = {"/b/main"}}),
              testing::ElementsAre("/a/program", "/b/main"));
  // As much as was opened: a whole file, and the end of the one before the program and the beginning of
  // the one behind it.
  EXPECT_THAT(neighbours_, testing::ElementsAre("/b/module", "/a/first", "/a/second"));
}

TEST_F(StartupOrderTest, NothingWithoutAProgram) {
  Add("/bin/sh", "plain\n");
  EXPECT_THAT(Order({}), testing::IsEmpty());
}

TEST_F(StartupOrderTest, NothingOnceItIsStopped) {
  Add("/bin/sh", "plain\n");
  std::stop_source stop;
  stop.request_stop();
  EXPECT_THAT(Order({.entrypoint = {"/bin/sh"}}, stop.get_token()), testing::IsEmpty());
}

TEST_F(StartupOrderTest, HostileImageIsNotLookedThroughForLong) {
  Add("/bin/main", "plain\n");
  Add("/etc/app.conf", "plain\n");
  std::string path = "PATH=/usr/bin";
  for (int i = 0; i < 64; ++i) path += ":/usr/bin";
  EXPECT_THAT(Order({.entrypoint = {"main"}, .environment = {path + ":/bin"}}), testing::IsEmpty());

  std::vector<std::string> arguments(10'000, "/nothing");
  arguments.push_back("/etc/app.conf");
  EXPECT_THAT(Order({.entrypoint = {"/bin/main"}, .command = arguments}),
              testing::ElementsAre("/bin/main"));

  const std::string slashes(4096, '/');
  EXPECT_THAT(Order({.entrypoint = {slashes + "bin/main"}}), testing::IsEmpty());

  // What is walked along all links counts.
  std::string detours;
  for (int i = 0; i < 500; ++i) detours += "../bin/";
  for (int i = 0; i < 5; ++i) Link(detours + std::to_string(i + 1), "/bin/" + std::to_string(i));
  Link("main", "/bin/5");
  EXPECT_THAT(Order({.entrypoint = {"/bin/0"}}), testing::IsEmpty());
  EXPECT_THAT(Order({.entrypoint = {"/bin/3"}}), testing::ElementsAre("/bin/main"));
}

TEST_F(StartupOrderTest, LoopsOfLinksAndInterpretersEnd) {
  Add("/bin/a", "#!/bin/b\n");
  Add("/bin/b", "#!/bin/a\n");
  Link("/bin/d", "/bin/c");
  Link("c", "/bin/d");
  Link("../../../../bin/a", "/bin/e");
  EXPECT_THAT(Order({.entrypoint = {"/bin/e"}, .command = {"/bin/c"}}),
              testing::ElementsAre("/bin/a", "/bin/b"));
}

}  // namespace
}  // namespace lamina::fs
