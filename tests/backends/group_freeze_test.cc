// SPDX-License-Identifier: Apache-2.0
#include "backends/group_freeze.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace lamina::backends {
namespace {

using ::testing::HasSubstr;

// A control group with a process that has `root` as its root directory, if that is not empty.
class GroupFreezeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "control groups need root";
    name_ = fmt::format("lamina/test-freeze-{}", ::getpid());
    absl::StatusOr<Cgroup> group = Cgroup::Create(name_, {});
    ASSERT_TRUE(group.ok()) << group.status();
    group_.emplace(*std::move(group));
  }
  void TearDown() override {
    if (group_) {
      EXPECT_TRUE(group_->Remove().ok());
    }
    for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
  }

  pid_t AddProcess(const std::string& root = "") {
    const pid_t child = ::fork();
    if (child == 0) {
      if (!root.empty() && (::chroot(root.c_str()) != 0 || ::chdir("/") != 0)) ::_exit(1);
      while (true) ::pause();
    }
    children_.push_back(child);
    EXPECT_TRUE(group_->Add(child).ok());
    return child;
  }
  bool ThawsSoon() {
    for (int i = 0; i < 500 && group_->Frozen(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return !group_->Frozen();
  }

  std::string name_;
  std::optional<Cgroup> group_;
  std::vector<pid_t> children_;
};

TEST_F(GroupFreezeTest, ASandboxIsOneGroupWhateverPartsItHas) {
  const pid_t outside = AddProcess();
  for (const char* part : {"programs", "starter"}) {
    const pid_t inside = AddProcess();
    ASSERT_TRUE(Cgroup::Create(fmt::format("{}/{}", name_, part), {})->Add(inside).ok());
    EXPECT_EQ((*Cgroup::OfProcess(inside))->name(), name_);
  }
  EXPECT_EQ((*Cgroup::OfProcess(outside))->name(), name_);
}

TEST_F(GroupFreezeTest, GroupsStandStillUntilTheEnd) {
  AddProcess();
  GroupFreeze freeze({*group_});
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(freeze.Begin().ok());
    EXPECT_TRUE(group_->Frozen());
    freeze.End();
    EXPECT_FALSE(group_->Frozen());
  }
}

TEST_F(GroupFreezeTest, WhatIsFrozenAlreadyStaysSo) {
  AddProcess();
  ASSERT_TRUE(group_->Freeze().ok());
  {
    GroupFreeze freeze({*group_});
    ASSERT_TRUE(freeze.Begin().ok());
  }
  EXPECT_TRUE(group_->Frozen());
  ASSERT_TRUE(group_->Thaw().ok());
}

TEST_F(GroupFreezeTest, OneWaitsForTheOther) {
  AddProcess();
  GroupFreeze first({*group_});
  ASSERT_TRUE(first.Begin().ok());
  std::atomic<bool> began = false;
  std::thread other([&] {
    GroupFreeze second({*group_});
    EXPECT_TRUE(second.Begin().ok());
    EXPECT_TRUE(group_->Frozen());
    began = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TRUE(group_->Frozen()) << "the first one's end is not the second one's";
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(began);
  first.End();
  other.join();
  EXPECT_FALSE(group_->Frozen());
}

TEST_F(GroupFreezeTest, WhoeverFroseThemMayBeKilled) {
  AddProcess();
  const pid_t killed = ::fork();
  if (killed == 0) {
    GroupFreeze freeze({*group_});
    if (!freeze.Begin().ok() || !group_->Frozen()) ::_exit(1);
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(killed, &status, 0), killed);
  ASSERT_TRUE(WIFSIGNALED(status)) << "it did not freeze them";
  EXPECT_TRUE(ThawsSoon());
}

TEST_F(GroupFreezeTest, TheGroupsOfAMountAreFoundByRootDirectories) {
  const std::string directory = ::testing::TempDir() + "/freeze-" + std::to_string(::getpid());
  ASSERT_EQ(::mkdir(directory.c_str(), 0755), 0);
  ASSERT_EQ(::mount("tmpfs", directory.c_str(), "tmpfs", 0, nullptr), 0);
  EXPECT_TRUE(GroupsOnMount(directory)->empty());
  AddProcess(directory);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto groups = GroupsOnMount(directory);
  ASSERT_TRUE(groups.ok()) << groups.status();
  ASSERT_EQ(groups->size(), 1u);
  EXPECT_EQ((*groups)[0].name(), name_);
  // One that is not on the mount is in the group as well: nobody may stop that.
  const pid_t other = AddProcess();
  const absl::Status status = GroupsOnMount(directory).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(other)));
  ASSERT_TRUE(group_->KillAll().ok());
  ::umount2(directory.c_str(), MNT_DETACH);
  ::rmdir(directory.c_str());
}

}  // namespace
}  // namespace lamina::backends
