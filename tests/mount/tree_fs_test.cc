// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/tree_fs.h"

#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "erofs/builder.h"
#include "fs/mount/mount.h"
#include "tests/mount/mount_testing.h"
#include "tests/mount/tree_differences.h"

namespace lamina::fs {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

class TreeFsTest : public MountTest {};

bool EndsSoon(const TreeFs& tree) {
  for (int i = 0; i < 500 && !tree.ended(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return tree.ended();
}

TEST_F(TreeFsTest, EndsWhenSomeoneElseUnmountsIt) {
  const TestImage image = ImageOfFiles({"content"});
  const auto mounted = Mount(image, Transport::kFuseTree);
  ASSERT_NE(mounted, nullptr);
  EXPECT_FALSE(mounted->tree_fs->ended());
  Shell("umount " + target());
  EXPECT_TRUE(EndsSoon(*mounted->tree_fs));
}

TEST_F(TreeFsTest, EndsWhenItsLastUserGoesAfterADetach) {
  const TestImage image = ImageOfFiles({"content"});
  const auto mounted = Mount(image, Transport::kFuseTree);
  ASSERT_NE(mounted, nullptr);
  UniqueFd user(::open((target() + "/f1").c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(Unmount(target(), /*detach=*/true).ok());
  char byte = 0;
  EXPECT_EQ(::pread(user.get(), &byte, 1, 0), 1);
  EXPECT_FALSE(mounted->tree_fs->ended());
  user.Reset();
  EXPECT_TRUE(EndsSoon(*mounted->tree_fs));
}

TEST_F(TreeFsTest, LeavesAMountAloneThatIsNotItsOwn) {
  const TestImage image = ImageOfFiles({"content"});
  auto mounted = Mount(image, Transport::kFuseTree);
  ASSERT_NE(mounted, nullptr);
  ASSERT_TRUE(Unmount(target()).ok());
  Shell("mount -t tmpfs other " + target());
  const MountGuard guard(target());
  mounted.reset();
  const auto other = FindMount(target());
  ASSERT_TRUE(other.ok() && other->has_value());
  EXPECT_EQ((*other)->type, "tmpfs");
}

TEST_F(TreeFsTest, ShowsItsSourceAndTypeInTheMountTable) {
  const TestImage image = ImageOfFiles({"content"});
  const auto tree = TreeFs::Start({.mountpoint = target(),
                                   .source = "oci:/images,a b:tag\\1",
                                   .metadata = AsBytes(image.metadata)});
  ASSERT_FALSE(tree.ok()) << "an image with a device and no blob";
  EXPECT_TRUE(absl::IsInvalidArgument(tree.status())) << tree.status();

  const auto empty = erofs::BuildImage(erofs::Tree(), {});
  const auto mounted = TreeFs::Start(
      {.mountpoint = target(), .source = "oci:/images,a b:tag\\1", .metadata = AsBytes(*empty)});
  ASSERT_TRUE(mounted.ok()) << mounted.status();
  const auto mount = FindMount(target());
  EXPECT_EQ((*mount)->type, "fuse.lamina");
  EXPECT_EQ((*mount)->source, "oci:/images,a b:tag\\1");
}

TEST_F(TreeFsTest, WhatIsNoImageOrNoDirectoryIsRefused) {
  const std::string text(8192, 'x');
  const auto no_image =
      TreeFs::Start({.mountpoint = target(), .source = "nonsense", .metadata = AsBytes(text)});
  ASSERT_FALSE(no_image.ok());
  EXPECT_THAT(std::string(no_image.status().message()), HasSubstr("nonsense"));

  const auto image = erofs::BuildImage(erofs::Tree(), {});
  const std::string file = root() + "/file";
  std::ofstream{file};
  for (const std::string& mountpoint : {root() + "/absent", file}) {
    const auto tree =
        TreeFs::Start({.mountpoint = mountpoint, .source = "image", .metadata = AsBytes(*image)});
    ASSERT_FALSE(tree.ok());
    EXPECT_THAT(std::string(tree.status().message()), HasSubstr(mountpoint));
  }
}

TEST_F(TreeFsTest, HugeDirectoriesAreListedAndSoughtIn) {
  constexpr size_t kFiles = 100'000;
  erofs::Tree tree;
  for (size_t i = 0; i < kFiles; ++i) {
    ASSERT_TRUE(
        tree.Create(erofs::Tree::kRoot, fmt::format("file-{}", i), {.mode = S_IFREG | 0644}).ok());
  }
  const auto image = erofs::BuildImage(tree, {});
  ASSERT_TRUE(image.ok()) << image.status();
  const auto mounted =
      TreeFs::Start({.mountpoint = target(), .source = "big", .metadata = AsBytes(*image)});
  ASSERT_TRUE(mounted.ok()) << mounted.status();

  DIR* directory = ::opendir(target().c_str());
  ASSERT_NE(directory, nullptr);
  std::vector<std::pair<long, std::string>> entries;  // where each entry is
  std::set<std::string> names;
  for (;;) {
    const long position = ::telldir(directory);
    const dirent* entry = ::readdir(directory);
    if (entry == nullptr) break;
    entries.emplace_back(position, entry->d_name);
    names.insert(entry->d_name);
  }
  EXPECT_EQ(entries.size(), kFiles + 2);
  EXPECT_EQ(names.size(), kFiles + 2);

  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const auto& [position, name] = entries[random() % entries.size()];
    ::seekdir(directory, position);
    const dirent* entry = ::readdir(directory);
    ASSERT_NE(entry, nullptr) << position;
    EXPECT_EQ(entry->d_name, name);
  }
  ::closedir(directory);
}

TEST_F(TreeFsTest, ImagesOfMkfsErofsAreShownToo) {
  const std::string source = MakeDirectory("source");
  Shell("cd " + source +
        " && mkdir sub && seq 100000 > sub/numbers && echo short > short && "
        "ln -s short link && ln short sub/hard && setfattr -n user.x -v y short");
  Shell("mkfs.erofs " + root() + "/image " + source);
  const std::string image = ReadAll(root() + "/image");
  const auto mounted =
      TreeFs::Start({.mountpoint = target(), .source = "mkfs", .metadata = AsBytes(image)});
  ASSERT_TRUE(mounted.ok()) << mounted.status();
  EXPECT_THAT(TreeDifferences(source, target()), IsEmpty());
}

TEST_F(TreeFsTest, OrdinaryUsersMountThroughFusermount) {
  const std::string content = chunkstore::RandomBytes(1'000'000, 1);
  const TestImage image = ImageOfFiles({content, "second"});
  std::filesystem::permissions(layout(), std::filesystem::perms(0755));
  ASSERT_EQ(::chown(target().c_str(), 65534, 65534), 0);
  const std::string nobodys_state = MakeDirectory("state");
  ASSERT_EQ(::chown(nobodys_state.c_str(), 65534, 65534), 0);

  AsNobody([&] {
    auto store = OpenStore();
    TreeFs::Options options{
        .mountpoint = target(), .source = "of,nobody", .metadata = AsBytes(image.metadata)};
    for (const auto& layer : image.layers) {
      auto blob = store->Attach(layer, NewOrigin());
      if (!blob.ok()) return 1;
      options.blobs.push_back(*std::move(blob));
    }
    auto tree = TreeFs::Start(std::move(options));
    if (!tree.ok()) {
      std::fprintf(stderr, "%s\n", std::string(tree.status().message()).c_str());
      return 2;
    }
    if (ReadAll(target() + "/f1") != content || ReadAll(target() + "/f2") != "second") return 3;
    const auto mount = FindMount(target());
    if (!mount.ok() || !mount->has_value() || (*mount)->source != "of,nobody") return 4;
    if ((*tree)->ended()) return 5;
    // A mount in use is refused, then detached, both by fusermount3.
    UniqueFd user(::open((target() + "/f1").c_str(), O_RDONLY | O_CLOEXEC));
    if (!absl::IsFailedPrecondition(Unmount(target()))) return 6;
    if (!Unmount(target(), /*detach=*/true).ok()) return 7;
    user.Reset();
    if (!EndsSoon(**tree)) return 8;
    if (!absl::IsNotFound(Unmount(target()))) return 9;
    return 0;
  });
  EXPECT_FALSE(FindMount(target()).value().has_value());
}

TEST_F(TreeFsTest, OrdinaryUsersAreToldWhyTheyCannotMount) {
  const auto image = erofs::BuildImage(erofs::Tree(), {});
  AsNobody([&] {
    // The directory is root's, so fusermount3 refuses.
    const auto tree =
        TreeFs::Start({.mountpoint = target(), .source = "x", .metadata = AsBytes(*image)});
    const std::string message(tree.status().message());
    return message.find("fusermount3") != std::string::npos &&
                   message.find(target()) != std::string::npos
               ? 0
               : 1;
  });
}

}  // namespace
}  // namespace lamina::fs
