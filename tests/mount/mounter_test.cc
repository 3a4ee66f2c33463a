// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/mounter.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "erofs/builder.h"
#include "fs/mount/mount.h"
#include "tests/mount/mount_testing.h"

namespace lamina::fs {
namespace {

using testing::HasSubstr;

class MounterTest : public MountTest {
 protected:
  std::string lock() const { return root() + "/mounter.lock"; }
  std::unique_ptr<Mounter> Start() const {
    auto mounter = Mounter::Start(lock());
    EXPECT_TRUE(mounter.ok()) << mounter.status();
    return *std::move(mounter);
  }
  std::string Metadata() const {
    const auto image = erofs::BuildImage(erofs::Tree(), {});
    const std::string path = root() + "/metadata";
    EXPECT_TRUE(WriteFileAtomically(path, *image).ok());
    return path;
  }
};

TEST_F(MounterTest, MountsAndUnmounts) {
  const auto mounter = Start();
  for (const bool loop : {false, true}) {
    ASSERT_TRUE(mounter->MountErofs(Metadata(), {}, target(), loop).ok());
    EXPECT_EQ(FindMount(target()).value()->type, "erofs");
    ASSERT_TRUE(mounter->Unmount(target()).ok());
    EXPECT_FALSE(FindMount(target()).value().has_value());
  }
}

TEST_F(MounterTest, ProcessThatDiedIsReplaced) {
  const auto mounter = Start();
  ASSERT_TRUE(mounter->MountErofs(Metadata(), {}, target(), false).ok());
  ASSERT_EQ(::kill(mounter->process(), SIGKILL), 0);
  const absl::Status noticed = mounter->Unmount(target());
  EXPECT_TRUE(absl::IsUnavailable(noticed)) << noticed;
  EXPECT_EQ(mounter->Unmount(target()), absl::OkStatus());
}

TEST_F(MounterTest, ErrorsAreThoseOfTheCalls) {
  const auto mounter = Start();
  const absl::Status missing = mounter->MountErofs(root() + "/absent", {}, target(), false);
  EXPECT_TRUE(absl::IsNotFound(missing)) << missing;
  EXPECT_THAT(std::string(missing.message()), HasSubstr(root() + "/absent"));
  EXPECT_TRUE(absl::IsNotFound(mounter->Unmount(target())));
}

TEST_F(MounterTest, UpperDirectoryGetsTheAttributesOfTheLowerOne) {
  const auto mounter = Start();
  const std::string lower = MakeDirectory("lower");
  ASSERT_EQ(::chmod(lower.c_str(), 0711), 0);
  ASSERT_EQ(::chown(lower.c_str(), 7, 8), 0);
  ASSERT_TRUE(
      mounter->MountOverlay({{lower}, root() + "/upper", MakeDirectory("work")}, target()).ok());
  struct stat info {};
  ASSERT_EQ(::stat(target().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0711u);
  EXPECT_EQ(info.st_uid, 7u);
  EXPECT_EQ(info.st_gid, 8u);
  ASSERT_TRUE(mounter->Unmount(target()).ok());
}

TEST_F(MounterTest, DoesNothingBeforeTheOneBeforeItHasEnded) {
  const std::string metadata = Metadata();
  const auto before = OpenFile(lock(), O_RDWR | O_CREAT, 0600);  // as that one has it
  ASSERT_EQ(::flock(before->get(), LOCK_EX), 0);
  const auto mounter = Start();
  std::atomic<bool> mounted = false;
  std::thread thread([&] {
    EXPECT_TRUE(mounter->MountErofs(metadata, {}, target(), false).ok());
    mounted = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(mounted);
  ASSERT_EQ(::flock(before->get(), LOCK_UN), 0);
  thread.join();
  EXPECT_TRUE(mounter->Unmount(target()).ok());
}

TEST_F(MounterTest, EndsWithItsParentAndKeepsNoneOfItsDescriptors) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto mounter = Start();
    ::kill(::getpid(), SIGKILL);
  }
  write_end.Reset();
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  // An end of file: nobody has the other end any more.
  char byte = 0;
  EXPECT_EQ(::read(read_end.get(), &byte, 1), 0);
  const auto mounter = Start();  // gets the lock
  EXPECT_TRUE(absl::IsNotFound(mounter->Unmount(target())));
}

}  // namespace
}  // namespace lamina::fs
