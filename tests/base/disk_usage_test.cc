// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/disk_usage.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "chunkstore/base/file.h"

namespace lamina {
namespace {

TEST(DiskUsage, CountsWhatIsThereOnce) {
  const auto directory = TemporaryDirectory::Create("/tmp", "lamina-usage-");
  ASSERT_TRUE(directory.ok()) << directory.status();
  const std::string& path = directory->path();
  std::filesystem::create_directory(path + "/sub");
  std::ofstream(path + "/sub/file") << std::string(100'000, 'x');
  const auto one = DiskUsageOf(path);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->inodes, 3);
  EXPECT_GE(one->bytes, 100'000);

  std::filesystem::create_hard_link(path + "/sub/file", path + "/again");
  std::filesystem::create_symlink("/etc", path + "/link");
  const auto two = DiskUsageOf(path);
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(two->inodes, 4);
}

TEST(DiskUsage, SaysWhatIsMissing) {
  const auto usage = DiskUsageOf("/no/such/directory");
  EXPECT_TRUE(absl::IsNotFound(usage.status())) << usage.status();
}

}  // namespace
}  // namespace lamina
