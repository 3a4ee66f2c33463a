// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/engine.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "fs/mount/mount.h"
#include "tests/engine/test_image.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class EngineTest : public ::testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "mounting without fusermount3 needs root";
  }
  void TearDown() override {
    // Whatever a failed test left.
    Unmount(image_.mountpoint(), /*detach=*/true).IgnoreError();
    Unmount(image_.state() + "/fuse", /*detach=*/true).IgnoreError();
  }

  std::unique_ptr<Engine> Open() {
    absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Open({.state = image_.state()});
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  MountRequest Request() const {
    return {.image = image_.reference(), .target = image_.mountpoint(), .transport = GetParam()};
  }
  bool IsMounted() const {
    const absl::StatusOr<std::optional<MountInfo>> mount = FindMount(image_.mountpoint());
    return mount.ok() && mount->has_value();
  }
  static void WaitUntilIdle(Engine& engine) {
    while (!engine.Idle()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  TestImage image_;
};

TEST_P(EngineTest, MountedImageShowsItsFiles) {
  const std::unique_ptr<Engine> engine = Open();
  const absl::StatusOr<MountDescription> mount = engine->Mount(Request());
  ASSERT_TRUE(mount.ok()) << mount.status();
  EXPECT_EQ(mount->transport, GetParam());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/hello.txt"), image_.hello());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
  EXPECT_TRUE(engine->Unmount(image_.mountpoint()).ok());
  EXPECT_FALSE(IsMounted());
  WaitUntilIdle(*engine);
}

TEST_P(EngineTest, UnmountLeavesNoDirectoryBehind) {
  const std::unique_ptr<Engine> engine = Open();
  ASSERT_TRUE(engine->Mount(Request()).ok());
  ASSERT_TRUE(engine->Unmount(image_.mountpoint()).ok());
  EXPECT_TRUE(std::filesystem::is_empty(image_.state() + "/mounts"));
}

TEST_P(EngineTest, ReportCountsWhatReadersCaused) {
  const std::unique_ptr<Engine> engine = Open();
  ASSERT_TRUE(engine->Mount(Request()).ok());
  Slurp(image_.mountpoint() + "/hello.txt");
  const absl::StatusOr<std::vector<MountReport>> one = engine->Report(image_.mountpoint());
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_EQ(one->size(), 1u);
  const MountReport& report = one->front();
  EXPECT_EQ(report.layers, 1u);
  EXPECT_GE(report.stats->read_requests.load(), 1u);
  EXPECT_GE(report.stats->fetched_frames.load(), 1u);
  EXPECT_GT(report.stats->fetched_bytes.load(), 0u);
  EXPECT_EQ(report.stats->failed_requests.load(), 0u);
  EXPECT_EQ(engine->Report("/nowhere").status().code(), absl::StatusCode::kNotFound);
}

TEST_P(EngineTest, WritableMountKeepsChangesAwayFromTheImage) {
  const std::unique_ptr<Engine> engine = Open();
  MountRequest request = Request();
  request.writable = true;
  ASSERT_TRUE(engine->Mount(request).ok());
  std::ofstream(image_.mountpoint() + "/hello.txt") << "changed\n";
  std::filesystem::remove(image_.mountpoint() + "/data.bin");
  EXPECT_EQ(Slurp(image_.mountpoint() + "/hello.txt"), "changed\n");
  ASSERT_TRUE(engine->Unmount(image_.mountpoint()).ok());

  ASSERT_TRUE(engine->Mount(Request()).ok());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/hello.txt"), image_.hello());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
}

TEST_P(EngineTest, RootOfAWritableMountHasTheAttributesOfTheImage) {
  const std::unique_ptr<Engine> engine = Open();
  struct stat plain {};
  struct stat writable {};
  MountRequest request = Request();
  ASSERT_TRUE(engine->Mount(request).ok());
  ASSERT_EQ(::stat(image_.mountpoint().c_str(), &plain), 0);
  ASSERT_TRUE(engine->Unmount(image_.mountpoint()).ok());
  request.writable = true;
  ASSERT_TRUE(engine->Mount(request).ok());
  ASSERT_EQ(::stat(image_.mountpoint().c_str(), &writable), 0);
  EXPECT_EQ(writable.st_mode, plain.st_mode);
  EXPECT_EQ(writable.st_uid, plain.st_uid);
  EXPECT_EQ(writable.st_gid, plain.st_gid);
  EXPECT_EQ(writable.st_mtim.tv_sec, plain.st_mtim.tv_sec);
  EXPECT_EQ(writable.st_mtim.tv_nsec, plain.st_mtim.tv_nsec);
}

TEST_P(EngineTest, WritableDirectoryKeepsChangesForTheNextMount) {
  const std::unique_ptr<Engine> engine = Open();
  const absl::StatusOr<TemporaryDirectory> kept =
      TemporaryDirectory::Create(testing::TempDir(), "lamina-engine-test-");
  ASSERT_TRUE(kept.ok());
  MountRequest request = Request();
  request.writable_dir = kept->path();
  for (const char* expected : {"hello\n", "changed\n"}) {
    const absl::StatusOr<MountDescription> mount = engine->Mount(request);
    ASSERT_TRUE(mount.ok()) << mount.status();
    EXPECT_EQ(Slurp(image_.mountpoint() + "/hello.txt"), expected);
    std::ofstream(image_.mountpoint() + "/hello.txt") << "changed\n";
    ASSERT_TRUE(engine->Unmount(image_.mountpoint()).ok());
  }
  EXPECT_EQ(Slurp(kept->path() + "/upper/hello.txt"), "changed\n");
}

TEST_P(EngineTest, OnlyAWritableDirectorySurvivesACrashOfTheMachine) {
  const std::unique_ptr<Engine> engine = Open();
  const absl::StatusOr<TemporaryDirectory> kept =
      TemporaryDirectory::Create(testing::TempDir(), "lamina-engine-test-");
  ASSERT_TRUE(kept.ok());
  const auto is_volatile = [&](const MountRequest& request) {
    EXPECT_TRUE(engine->Mount(request).ok());
    const auto info = FindMount(image_.mountpoint());
    EXPECT_TRUE(engine->Unmount(image_.mountpoint()).ok());
    return info.value()->super_options.find("volatile") != std::string::npos;
  };
  MountRequest request = Request();
  request.writable = true;
  EXPECT_TRUE(is_volatile(request));
  request.writable_dir = kept->path();
  EXPECT_FALSE(is_volatile(request));
  request.is_volatile = true;
  EXPECT_TRUE(is_volatile(request));
  EXPECT_TRUE(is_volatile(request));  // again, in the same directory
}

TEST_P(EngineTest, UnmountByOthersIsNoticed) {
  const std::unique_ptr<Engine> engine = Open();
  ASSERT_TRUE(engine->Mount(Request()).ok());
  engine->ForgetGoneMounts();
  EXPECT_TRUE(engine->HasMounts());
  ASSERT_TRUE(Unmount(image_.mountpoint()).ok());
  engine->ForgetGoneMounts();
  EXPECT_FALSE(engine->HasMounts());
  EXPECT_EQ(engine->Unmount(image_.mountpoint()).code(), absl::StatusCode::kNotFound);
  WaitUntilIdle(*engine);
}

TEST_P(EngineTest, DetachedMountIsServedToItsLastReader) {
  const std::unique_ptr<Engine> engine = Open();
  ASSERT_TRUE(engine->Mount(Request()).ok());
  absl::StatusOr<UniqueFd> file = OpenFile(image_.mountpoint() + "/data.bin", O_RDONLY);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(Unmount(image_.mountpoint(), /*detach=*/true).ok());
  engine->ForgetGoneMounts();
  EXPECT_FALSE(engine->Idle());
  std::string content(image_.data().size(), '\0');
  ASSERT_TRUE(ReadFull(file->get(), 0, std::as_writable_bytes(std::span(content))).ok());
  EXPECT_EQ(content, image_.data());
  file->Reset();
  WaitUntilIdle(*engine);
}

TEST_P(EngineTest, BusyMountIsNotUnmounted) {
  const std::unique_ptr<Engine> engine = Open();
  ASSERT_TRUE(engine->Mount(Request()).ok());
  absl::StatusOr<UniqueFd> file = OpenFile(image_.mountpoint() + "/data.bin", O_RDONLY);
  ASSERT_TRUE(file.ok());
  const absl::Status status = engine->Unmount(image_.mountpoint());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(engine->HasMounts());
  file->Reset();
  EXPECT_TRUE(engine->Unmount(image_.mountpoint()).ok());
}

TEST_P(EngineTest, WhatIsMountedOverAMountIsLeftAlone) {
  const std::unique_ptr<Engine> engine = Open();
  ASSERT_TRUE(engine->Mount(Request()).ok());
  ASSERT_EQ(::mount("other", image_.mountpoint().c_str(), "tmpfs", 0, nullptr), 0);
  const absl::Status status = engine->Unmount(image_.mountpoint());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("other"));
  ASSERT_TRUE(Unmount(image_.mountpoint()).ok());
  EXPECT_TRUE(engine->Unmount(image_.mountpoint()).ok());
}

TEST_P(EngineTest, SecondMountAtOnePlaceIsRefused) {
  const std::unique_ptr<Engine> engine = Open();
  ASSERT_TRUE(engine->Mount(Request()).ok());
  EXPECT_EQ(engine->Mount(Request()).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Slurp(image_.mountpoint() + "/hello.txt"), image_.hello());
}

TEST_P(EngineTest, FailedMountLeavesNothing) {
  const std::unique_ptr<Engine> engine = Open();
  MountRequest request = Request();
  request.target = image_.mountpoint() + "/missing";
  EXPECT_FALSE(engine->Mount(request).ok());
  request = Request();
  request.image = "oci:" + image_.layout() + ":missing";
  EXPECT_THAT(std::string(engine->Mount(request).status().message()), HasSubstr("missing"));
  EXPECT_TRUE(engine->Idle());
  EXPECT_TRUE(std::filesystem::is_empty(image_.state() + "/mounts"));
}

TEST_P(EngineTest, MountsOfAKilledEngineAreRemovedByTheNext) {
  const pid_t child = ::fork();
  if (child == 0) {
    const std::unique_ptr<Engine> engine = Open();
    const bool mounted = engine->Mount(Request()).ok();
    ::kill(::getpid(), mounted ? SIGKILL : SIGTERM);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);

  const std::unique_ptr<Engine> engine = Open();
  EXPECT_FALSE(IsMounted());
  EXPECT_TRUE(std::filesystem::is_empty(image_.state() + "/mounts"));
  // Asking for the unmount afterwards is not an error: it is what the user wants to be sure of.
  EXPECT_TRUE(engine->Unmount(image_.mountpoint()).ok());
  ASSERT_TRUE(engine->Mount(Request()).ok());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
}

TEST_P(EngineTest, StateDirectoryHasOneEngine) {
  const std::unique_ptr<Engine> engine = Open();
  const absl::Status status = Engine::Open({.state = image_.state()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(image_.state()));
}

TEST_P(EngineTest, EndsWhileARegistryDoesNotAnswer) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener.get(), 16), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string image = fmt::format("docker://127.0.0.1:{}/a:b", ntohs(address.sin_port));

  std::unique_ptr<Engine> engine = Open();
  engine->prefetch_jobs().Start({.image = image});
  std::thread mounting([&] {
    MountRequest request = Request();
    request.image = image;
    EXPECT_FALSE(engine->Mount(request).ok());
  });
  // One asks, and the other waits for the same connection, or will.
  const UniqueFd asked(::accept(listener.get(), nullptr, nullptr));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto start = std::chrono::steady_clock::now();
  engine->StopRequests();
  mounting.join();
  engine = nullptr;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_NE(Open(), nullptr);  // nothing holds the state directory
}

TEST_P(EngineTest, ContentStaysOnTheNodeForTheNextMount) {
  const std::unique_ptr<Engine> engine = Open();
  for (const bool first : {true, false}) {
    ASSERT_TRUE(engine->Mount(Request()).ok());
    Slurp(image_.mountpoint() + "/data.bin");
    const absl::StatusOr<std::vector<MountReport>> reports = engine->Report(image_.mountpoint());
    ASSERT_TRUE(reports.ok());
    EXPECT_EQ(reports->front().stats->fetched_bytes.load() > 0, first);
    ASSERT_TRUE(engine->Unmount(image_.mountpoint()).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, EngineTest,
                         ::testing::Values(Transport::kErofs, Transport::kFuse),
                         [](const auto& info) { return std::string(TransportName(info.param)); });

}  // namespace
}  // namespace lamina::fs
