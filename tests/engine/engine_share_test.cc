// SPDX-License-Identifier: Apache-2.0
//
// Several mounts of one image share one EROFS file system, and whatever else happens to one of them is
// none of the others' business.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "fs/engine/engine.h"
#include "fs/mount/mount.h"
#include "tests/engine/test_image.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;

class EngineShareTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "mounting EROFS needs root";
    engine_ = *Engine::Open({.state = image_.state()});
  }
  void TearDown() override {
    engine_ = nullptr;
    for (int number = 1; number <= kTargets; ++number) {
      Unmount(Target(number), /*detach=*/true).IgnoreError();
    }
  }

  std::string Target(int number) {
    const std::string path = image_.mountpoint() + std::to_string(number);
    std::filesystem::create_directory(path);
    return path;
  }
  MountRequest Request(int number, bool writable = false) {
    return {.image = image_.reference(),
            .target = Target(number),
            .transport = Transport::kErofs,
            .writable = writable};
  }
  void MountAt(int number, bool writable = false) {
    const auto mount = engine_->Mount(Request(number, writable));
    ASSERT_TRUE(mount.ok()) << mount.status();
  }
  MountReport ReportOf(int number) { return engine_->Report(Target(number))->front(); }
  static dev_t DeviceOf(const std::string& path) {
    struct stat info {};
    EXPECT_EQ(::stat(path.c_str(), &info), 0) << path;
    return info.st_dev;
  }
  size_t DirectoriesInState() const {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator(image_.state() + "/mounts")) {
      ++count;
    }
    return count;
  }
  void WaitUntilIdle() {
    while (!engine_->Idle()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  static constexpr int kTargets = 4;
  TestImage image_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineShareTest, WhatOneMountReadIsThereForTheOthers) {
  MountAt(1);
  EXPECT_EQ(Slurp(Target(1) + "/data.bin"), image_.data());
  const uint64_t read = ReportOf(1).stats->read_bytes;
  MountAt(2);
  MountAt(3, /*writable=*/true);
  EXPECT_EQ(DeviceOf(Target(1)), DeviceOf(Target(2)));
  EXPECT_EQ(Slurp(Target(2) + "/data.bin"), image_.data());
  EXPECT_EQ(Slurp(Target(3) + "/data.bin"), image_.data());
  for (const int number : {1, 2, 3}) {
    const MountReport report = ReportOf(number);
    EXPECT_EQ(report.sharing, 3u);
    EXPECT_EQ(report.stats->read_bytes, read);
  }
}

TEST_F(EngineShareTest, AnImageIsServedUntilItsLastMountGoes) {
  MountAt(1);
  MountAt(2, /*writable=*/true);
  ASSERT_TRUE(engine_->Unmount(Target(1)).ok());
  EXPECT_EQ(Slurp(Target(2) + "/data.bin"), image_.data());  // nobody had read it
  MountAt(1);
  ASSERT_TRUE(engine_->Unmount(Target(2)).ok());
  EXPECT_EQ(ReportOf(1).sharing, 1u);
  EXPECT_EQ(Slurp(Target(1) + "/hello.txt"), image_.hello());
  EXPECT_EQ(DirectoriesInState(), 2u);
  ASSERT_TRUE(engine_->Unmount(Target(1)).ok());
  EXPECT_EQ(DirectoriesInState(), 0u);
  EXPECT_TRUE(engine_->Idle());
}

TEST_F(EngineShareTest, ChangesStayWithTheirMount) {
  MountAt(1, /*writable=*/true);
  MountAt(2, /*writable=*/true);
  std::ofstream(Target(1) + "/hello.txt") << "changed\n";
  EXPECT_EQ(Slurp(Target(1) + "/hello.txt"), "changed\n");
  EXPECT_EQ(Slurp(Target(2) + "/hello.txt"), image_.hello());
}

// Below a mount that is shared between namespaces, as "/" is where systemd runs.
TEST_F(EngineShareTest, WhatIsMountedBelowOneIsNotBelowTheOthers) {
  engine_ = nullptr;
  const std::string root = std::filesystem::path(image_.mountpoint()).parent_path();
  ASSERT_EQ(::mount(root.c_str(), root.c_str(), nullptr, MS_BIND, nullptr), 0);
  ASSERT_EQ(::mount(nullptr, root.c_str(), nullptr, MS_SHARED, nullptr), 0);
  engine_ = *Engine::Open({.state = image_.state()});
  MountAt(1);
  MountAt(2);
  const std::string file = Target(1) + "/hello.txt";
  ASSERT_EQ(::mount("/dev/null", file.c_str(), nullptr, MS_BIND, nullptr), 0);
  EXPECT_NE(DeviceOf(file), DeviceOf(Target(1)));
  EXPECT_EQ(Slurp(Target(2) + "/hello.txt"), image_.hello());
  EXPECT_EQ(::umount(file.c_str()), 0);
  engine_ = nullptr;
  EXPECT_EQ(::umount2(root.c_str(), MNT_DETACH), 0);
}

TEST_F(EngineShareTest, ABusyMountDoesNotKeepTheOthers) {
  MountAt(1);
  MountAt(2);
  UniqueFd file = *OpenFile(Target(1) + "/data.bin", O_RDONLY);
  EXPECT_EQ(engine_->Unmount(Target(1)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine_->Unmount(Target(2)).ok());
  file.Reset();
  EXPECT_TRUE(engine_->Unmount(Target(1)).ok());
  WaitUntilIdle();
}

// As a container's mount namespace has, when the mount goes on the host.
TEST_F(EngineShareTest, DirectoriesOfAnOverlayStayAsLongAsAnyoneUsesIt) {
  MountAt(1, /*writable=*/true);
  MountAt(2);
  int ready[2];
  int go[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(go, O_CLOEXEC), 0);
  const std::string root = Target(1);
  const std::string upper = ReportOf(1).mount.upper;
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    const bool moved = ::unshare(CLONE_NEWNS) == 0 &&
                       ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                       ::write(ready[1], &byte, 1) == 1 && ::read(go[0], &byte, 1) == 1;
    const bool wrote = moved && ::mkdir((root + "/new").c_str(), 0755) == 0 &&
                       ::open((root + "/hello.txt").c_str(), O_RDWR) >= 0;  // is copied up
    ::_exit(wrote ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ASSERT_TRUE(engine_->Unmount(Target(1)).ok());
  EXPECT_TRUE(engine_->HasDetachedMounts());
  EXPECT_TRUE(std::filesystem::exists(upper));
  ASSERT_EQ(::write(go[1], &byte, 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the overlay does not work any more";
  while (engine_->HasDetachedMounts()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    engine_->ForgetGoneMounts();
  }
  EXPECT_FALSE(std::filesystem::exists(upper));
  EXPECT_EQ(Slurp(Target(2) + "/data.bin"), image_.data());
  ASSERT_TRUE(engine_->Unmount(Target(2)).ok());
  EXPECT_TRUE(engine_->Idle());
}

TEST_F(EngineShareTest, TheLastUserMayBeAnOverlayThatIsUnmountedAlready) {
  MountAt(1, /*writable=*/true);
  MountAt(2);
  UniqueFd file = *OpenFile(Target(1) + "/data.bin", O_RDONLY);
  ASSERT_TRUE(Unmount(Target(1), /*detach=*/true).ok());
  engine_->ForgetGoneMounts();
  ASSERT_TRUE(engine_->Unmount(Target(2)).ok());
  EXPECT_FALSE(engine_->Idle());
  MountAt(3);  // shares what is there
  EXPECT_EQ(DirectoriesInState(), 3u);
  ASSERT_TRUE(engine_->Unmount(Target(3)).ok());
  std::string content(image_.data().size(), '\0');
  ASSERT_TRUE(ReadFull(file.get(), 0, std::as_writable_bytes(std::span(content))).ok());
  EXPECT_EQ(content, image_.data());
  file.Reset();
  WaitUntilIdle();
  EXPECT_EQ(DirectoriesInState(), 0u);
}

TEST_F(EngineShareTest, AnImageThatSomeoneUnmountedIsMountedAgain) {
  MountAt(1);
  ASSERT_TRUE(Unmount(image_.state() + "/mounts/image-1").ok());
  MountAt(2);
  MountAt(3, /*writable=*/true);
  EXPECT_NE(DeviceOf(Target(1)), DeviceOf(Target(2)));
  EXPECT_EQ(ReportOf(2).sharing, 2u);
  for (const int number : {1, 2, 3}) {
    EXPECT_EQ(Slurp(Target(number) + "/data.bin"), image_.data()) << number;
    ASSERT_TRUE(engine_->Unmount(Target(number)).ok());
  }
  WaitUntilIdle();
  EXPECT_EQ(DirectoriesInState(), 0u);
}

TEST_F(EngineShareTest, MetadataThatWereDamagedAreNotShared) {
  MountAt(1);
  std::string metadata;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(image_.state() + "/images")) {
    if (entry.path().filename() == "metadata") metadata = entry.path();
  }
  std::fstream file(metadata, std::ios::in | std::ios::out);
  file.seekp(-1, std::ios::end);
  file.put('\x55');
  file.close();
  MountAt(2);
  EXPECT_NE(DeviceOf(Target(1)), DeviceOf(Target(2)));
  EXPECT_EQ(Slurp(Target(2) + "/data.bin"), image_.data());
}

TEST_F(EngineShareTest, ARecordedStartIsOfOneMount) {
  MountAt(1);
  EXPECT_EQ(Slurp(Target(1) + "/data.bin"), image_.data());
  MountRequest request = Request(2);
  request.record = true;
  ASSERT_TRUE(engine_->Mount(request).ok());
  MountAt(3);
  EXPECT_EQ(ReportOf(2).sharing, 1u);
  EXPECT_EQ(ReportOf(3).sharing, 2u);
  EXPECT_EQ(Slurp(Target(2) + "/data.bin"), image_.data());
  const absl::StatusOr<Profile> profile = engine_->StopRecording(Target(2));
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_FALSE(profile->touches.empty());
}

TEST_F(EngineShareTest, WhatAnImageCountedIsNotCountedTwice) {
  MountAt(1);
  Slurp(Target(1) + "/data.bin");
  MountAt(2);
  std::vector<ImageReport> images = engine_->ReportImages();
  ASSERT_EQ(images.size(), 1u);
  EXPECT_EQ(images[0].mounts, 2u);
  const uint64_t read = images[0].stats->read_bytes;
  EXPECT_EQ(read, ReportOf(1).stats->read_bytes);
  ASSERT_TRUE(engine_->Unmount(Target(1)).ok());
  images = engine_->ReportImages();
  ASSERT_EQ(images.size(), 1u);
  EXPECT_EQ(images[0].mounts, 1u);
  EXPECT_EQ(images[0].stats->read_bytes, read);
}

TEST_F(EngineShareTest, ForksShareWhatTheirSourceReads) {
  MountAt(1, /*writable=*/true);
  const auto forks = engine_->Fork({.target = Target(1), .count = 3});
  ASSERT_TRUE(forks.ok()) << forks.status();
  EXPECT_EQ(Slurp(Target(1) + "/data.bin"), image_.data());
  const uint64_t read = ReportOf(1).stats->read_bytes;
  for (const MountDescription& fork : *forks) {
    EXPECT_EQ(Slurp(fork.target + "/data.bin"), image_.data());
  }
  EXPECT_EQ(ReportOf(1).sharing, 4u);
  EXPECT_EQ(ReportOf(1).stats->read_bytes, read);
  ASSERT_TRUE(engine_->Unmount(Target(1)).ok());
  EXPECT_EQ(Slurp(forks->front().target + "/hello.txt"), image_.hello());
}

TEST_F(EngineShareTest, AFailedMountLeavesTheOthersAlone) {
  MountAt(1);
  MountRequest request = Request(2);
  request.target = image_.mountpoint() + "-absent";
  EXPECT_FALSE(engine_->Mount(request).ok());
  EXPECT_EQ(Slurp(Target(1) + "/data.bin"), image_.data());
  EXPECT_EQ(ReportOf(1).sharing, 1u);
  EXPECT_EQ(DirectoriesInState(), 2u);
}

TEST_F(EngineShareTest, AFailedWritableMountCanBeTriedAgain) {
  MountAt(1);
  MountRequest request = Request(2);
  request.writable_dir = image_.mountpoint() + "-kept";
  std::filesystem::create_directory(request.writable_dir);
  const std::string target = std::exchange(request.target, image_.mountpoint() + "-absent");
  for (int attempt = 0; attempt < 3; ++attempt) EXPECT_FALSE(engine_->Mount(request).ok());
  EXPECT_FALSE(engine_->HasDetachedMounts());
  request.target = target;
  const auto mount = engine_->Mount(request);
  EXPECT_TRUE(mount.ok()) << mount.status();
}

TEST_F(EngineShareTest, LinksOfAnImageLeadNoUnmountElsewhere) {
  const std::string outside = image_.mountpoint() + "-outside";
  std::filesystem::create_directory(outside);
  ASSERT_EQ(::mount("outside", outside.c_str(), "tmpfs", 0, nullptr), 0);
  engine_ = nullptr;
  const pid_t child = ::fork();
  if (child == 0) {
    const auto engine = Engine::Open({.state = image_.state()});
    ::kill(::getpid(), engine.ok() && (*engine)->Mount(Request(1)).ok() ? SIGKILL : SIGTERM);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  engine_ = *Engine::Open({.state = image_.state()});
  EXPECT_EQ(DirectoriesInState(), 0u);
  EXPECT_NE(DeviceOf(outside), DeviceOf(image_.state()));
  EXPECT_EQ(::umount(outside.c_str()), 0);
}

TEST_F(EngineShareTest, ARecordingEndsWithItsMount) {
  MountAt(1);
  MountAt(2);
  ASSERT_TRUE(engine_->StartRecording(Target(1)).ok());
  EXPECT_EQ(engine_->StopRecording(Target(2)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(engine_->Unmount(Target(1)).ok());
  EXPECT_TRUE(engine_->StartRecording(Target(2)).ok());
  Slurp(Target(2) + "/hello.txt");
  const absl::StatusOr<Profile> profile = engine_->StopRecording(Target(2));
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->touches.size(), 1u);
}

TEST_F(EngineShareTest, LaterMountsGetThePrefetchThatTheFirstDidWithout) {
  MountRequest first = Request(1);
  first.prefetch.enabled = false;
  ASSERT_TRUE(engine_->Mount(first).ok());
  EXPECT_EQ(ReportOf(1).prefetch_stats, nullptr);
  MountRequest fill = Request(2);
  fill.prefetch.fill = true;
  ASSERT_TRUE(engine_->Mount(fill).ok());
  MountAt(3);
  const auto all_there = [&] {
    const MountReport report = ReportOf(1);
    return report.frames_present == report.frames;
  };
  while (!all_there()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_GT(ReportOf(3).prefetch_stats->fetched_frames.load(), 0u);
}

TEST_F(EngineShareTest, LoopDevicesAreSharedAmongThemselves) {
  MountAt(1);
  for (const int number : {2, 3}) {
    MountRequest request = Request(number);
    request.loop = true;
    const auto mount = engine_->Mount(request);
    ASSERT_TRUE(mount.ok()) << mount.status();
    EXPECT_EQ(Slurp(Target(number) + "/data.bin"), image_.data());
  }
  EXPECT_EQ(ReportOf(1).sharing, 1u);
  EXPECT_EQ(ReportOf(2).sharing, 2u);
}

}  // namespace
}  // namespace lamina::fs
