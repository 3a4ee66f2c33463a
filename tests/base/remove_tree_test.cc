// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/remove_tree.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "chunkstore/base/disk_usage.h"
#include "chunkstore/base/file.h"

namespace lamina {
namespace {

// This process may have few descriptors meanwhile.
class FewDescriptors {
 public:
  FewDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few{.rlim_cur = 32, .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

class RemoveTreeTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_.path() + "/" + name; }

  TemporaryDirectory directory_ = TemporaryDirectory::Create("/tmp", "lamina-remove-").value();
};

TEST_F(RemoveTreeTest, RemovesAllKindsOfFilesAndFollowsNoLinks) {
  std::filesystem::create_directories(path("tree/a/b/c"));
  std::filesystem::create_directories(path("tree/.removed-0/.removed-0/x"));
  std::filesystem::create_directories(path("other"));
  std::ofstream(path("other/kept")) << "x";
  std::ofstream(path("tree/a/b/c/file")) << "x";
  std::ofstream(path("tree/.removed-1")) << "x";
  std::filesystem::create_directory_symlink(path("other"), path("tree/a/b/link"));
  ASSERT_EQ(::mkfifo(path("tree/a/fifo").c_str(), 0600), 0);
  EXPECT_EQ(RemoveTree(path("tree")), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(path("tree")));
  EXPECT_TRUE(std::filesystem::exists(path("other/kept")));
  EXPECT_EQ(RemoveTree(path("tree")), absl::OkStatus()) << "it is not there";
}

TEST_F(RemoveTreeTest, DepthIsNoDefence) {
  constexpr int kDepth = 3000;
  const std::string name(200, 'd');
  ASSERT_EQ(::mkdir(path("deep").c_str(), 0700), 0);
  {
    UniqueFd at = OpenFile(path("deep"), O_RDONLY | O_DIRECTORY).value();
    for (int level = 0; level < kDepth; ++level) {
      ASSERT_EQ(::mkdirat(at.get(), name.c_str(), 0700), 0);
      UniqueFd next(::openat(at.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      ASSERT_TRUE(next.valid());
      ASSERT_EQ(::mkdirat(next.get(), "beside", 0700), 0);
      at = std::move(next);
    }
    const UniqueFd file(::openat(at.get(), "file", O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::write(file.get(), name.data(), name.size()), 200);
  }
  const FewDescriptors few;
  const absl::StatusOr<DiskUsage> usage = DiskUsageOf(path("deep"));
  ASSERT_EQ(usage.status(), absl::OkStatus());
  EXPECT_EQ(usage->inodes, 1 + 2 * kDepth + 1);
  EXPECT_EQ(RemoveTree(path("deep")), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(path("deep")));
}

}  // namespace
}  // namespace lamina
