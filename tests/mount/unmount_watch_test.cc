// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/unmount_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fs/mount/mount.h"
#include "tests/mount/mount_testing.h"

namespace lamina::fs {
namespace {

class UnmountWatchTest : public MountTest {
 protected:
  static void MountTmpfs(const std::string& path) {
    ASSERT_EQ(::mount("watched", path.c_str(), "tmpfs", 0, nullptr), 0);
  }
  static dev_t DeviceOf(const std::string& path) {
    struct stat info {};
    EXPECT_EQ(::stat(path.c_str(), &info), 0);
    return info.st_dev;
  }
};

TEST_F(UnmountWatchTest, AFileSystemEndsWithItsLastUser) {
  MountTmpfs(target());
  UnmountWatch watches;
  const int watch = *watches.Add(target(), DeviceOf(target()));
  EXPECT_FALSE(watches.Ended(watch));
  UniqueFd file = *OpenFile(target() + "/file", O_RDWR | O_CREAT, 0600);
  ASSERT_TRUE(Unmount(target(), /*detach=*/true).ok());
  EXPECT_FALSE(watches.Ended(watch));
  file.Reset();
  // The kernel lets go of it after close(2) has returned.
  while (!watches.Ended(watch)) ::usleep(1000);
  EXPECT_TRUE(watches.Ended(watch));
}

TEST_F(UnmountWatchTest, AWatchedFileSystemCanBeUnmounted) {
  MountTmpfs(target());
  UnmountWatch watches;
  const int watch = *watches.Add(target(), DeviceOf(target()));
  ASSERT_TRUE(Unmount(target()).ok());
  EXPECT_TRUE(watches.Ended(watch));
  watches.Forget(watch);
  EXPECT_FALSE(watches.Ended(watch));
}

TEST_F(UnmountWatchTest, FileSystemsAreWatchedEachByItself) {
  const std::string other = MakeDirectory("other");
  MountTmpfs(target());
  MountTmpfs(other);
  UnmountWatch watches;
  const int first = *watches.Add(target(), DeviceOf(target()));
  const int second = *watches.Add(other, DeviceOf(other));
  ASSERT_NE(first, second);
  ASSERT_TRUE(Unmount(target()).ok());
  EXPECT_TRUE(watches.Ended(first));
  EXPECT_FALSE(watches.Ended(second));
  watches.Forget(second);
  ASSERT_TRUE(Unmount(other).ok());
  EXPECT_FALSE(watches.Ended(second));
}

TEST_F(UnmountWatchTest, WhatIsNotThereIsAnError) {
  UnmountWatch watches;
  MountTmpfs(target());
  EXPECT_TRUE(absl::IsNotFound(watches.Add(root() + "/absent", 0).status()));
  EXPECT_TRUE(absl::IsNotFound(watches.Add(target(), DeviceOf(root())).status()));
  ASSERT_TRUE(Unmount(target()).ok());
}

}  // namespace
}  // namespace lamina::fs
