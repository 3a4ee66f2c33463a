// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/tree.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <thread>

#include "chunkstore/base/file.h"

namespace lamina::agent {
namespace {

TEST(AgentTree, DirectoriesArriveWithTheirPermissionsAndTimes) {
  const TemporaryDirectory directory =
      TemporaryDirectory::Create(testing::TempDir(), "agent-tree-").value();
  const std::string from = directory.path() + "/from";
  const std::string to = directory.path() + "/to";
  std::array<timespec, 2> times{timespec{.tv_nsec = UTIME_OMIT}, timespec{.tv_sec = 1000}};
  const std::array<const char*, 6> names{"", "/a", "/a/b", "/a/b/c", "/ab", "/z"};
  for (const char* name : names) std::filesystem::create_directory(from + name);
  std::ofstream(from + "/a/b/file") << "x";
  std::ofstream(from + "/a/last") << "x";
  for (const char* name : names) {
    ASSERT_EQ(::chmod((from + name).c_str(), 0511), 0);
    ASSERT_EQ(::utimensat(AT_FDCWD, (from + name).c_str(), times.data(), 0), 0);
    ++times[1].tv_sec;
  }
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const UniqueFd sends(ends[0]);
  const UniqueFd receives(ends[1]);
  std::thread sender([&] { EXPECT_EQ(SendTree(sends.get(), from).status(), absl::OkStatus()); });
  const absl::StatusOr<TreeCount> count = ReceiveTree(receives.get(), to, {});
  sender.join();
  ASSERT_EQ(count.status(), absl::OkStatus());
  EXPECT_EQ(count->entries, names.size() + 2);
  time_t expected = 1000;
  for (const char* name : names) {
    struct stat info {};
    ASSERT_EQ(::stat((to + name).c_str(), &info), 0) << name;
    EXPECT_EQ(info.st_mode & 07777, 0511) << name;
    EXPECT_EQ(info.st_mtim.tv_sec, expected++) << name;
  }
}

}  // namespace
}  // namespace lamina::agent
