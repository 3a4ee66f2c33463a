// SPDX-License-Identifier: Apache-2.0
//
// Engines that follow each other on one state directory; the test holds the descriptors.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "chunkstore/base/descriptor_message.h"
#include "fs/engine/engine.h"
#include "fs/engine/server.h"
#include "fs/mount/mount.h"
#include "tests/engine/test_image.h"

namespace lamina::fs {
namespace {

class EngineTakeOverTest : public ::testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "mounting without fusermount3 needs root";
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    ours_.Reset(ends[0]);
    theirs_.Reset(ends[1]);
  }
  void TearDown() override {
    held_.clear();
    Unmount(image_.mountpoint(), /*detach=*/true).IgnoreError();
    Unmount(image_.state() + "/fuse", /*detach=*/true).IgnoreError();
  }

  // With what the engine before left.
  EngineOptions Options() {
    ReceiveAll();
    std::multimap<std::string, UniqueFd> inherited;
    for (const auto& [name, fd] : held_) {
      inherited.emplace(name, ::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    }
    return {.state = image_.state(),
            .holder = std::make_shared<DescriptorHolder>(
                std::move(inherited),
                NotifySocket(UniqueFd(::fcntl(theirs_.get(), F_DUPFD_CLOEXEC, 0))))};
  }
  std::unique_ptr<Engine> Open() {
    auto engine = Engine::Open(Options());
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  // Does as holders do.
  void ReceiveAll() {
    while (true) {
      auto received = ReceiveDescriptorMessage(ours_.get(), MSG_DONTWAIT);
      if (!received.ok()) return;
      const std::string& message = received->text;
      const std::string name = message.substr(message.find("FDNAME=") + 7);
      if (message.starts_with("FDSTOREREMOVE=1")) held_.erase(name);
      if (!message.starts_with("FDSTORE=1")) continue;
      held_.emplace(name, received->TakeFirst());
    }
  }
  // An engine in a process that does `work` and is then killed.
  void KillEngineAfter(const std::function<bool(Engine&)>& work) {
    ReceiveAll();
    const pid_t child = ::fork();
    if (child == 0) {
      const std::unique_ptr<Engine> engine = Open();
      ::kill(::getpid(), work(*engine) ? SIGKILL : SIGTERM);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  }

  MountRequest Request() const {
    return {.image = image_.reference(), .target = image_.mountpoint(), .transport = GetParam()};
  }
  bool IsMounted() const { return FindMount(image_.mountpoint()).value().has_value(); }

  TestImage image_;
  UniqueFd ours_;
  UniqueFd theirs_;
  std::map<std::string, UniqueFd> held_;
};

TEST_P(EngineTakeOverTest, MountsOfAKilledEngineAreServedByTheNext) {
  for (const bool writable : {false, true}) {
    MountRequest request = Request();
    request.writable = writable;
    KillEngineAfter([&](Engine& engine) { return engine.Mount(request).ok(); });
    const std::unique_ptr<Engine> engine = Open();
    EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
    const auto report = engine->Report(image_.mountpoint());
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->front().mount.image, image_.reference());
    EXPECT_EQ(report->front().mount.writable, writable);
    EXPECT_GE(report->front().stats->read_requests.load(), 1u);
    EXPECT_TRUE(engine->Unmount(image_.mountpoint()).ok());
    EXPECT_FALSE(IsMounted());
  }
}

TEST_P(EngineTakeOverTest, HandedOverMountsStayWhileNoEngineRuns) {
  for (int life = 0; life < 3; ++life) {
    const std::unique_ptr<Engine> engine = Open();
    if (life == 0) {
      ASSERT_TRUE(engine->Mount(Request()).ok());
    }
    EXPECT_EQ(Slurp(image_.mountpoint() + "/hello.txt"), image_.hello());
    engine->HandOver();
  }
  EXPECT_TRUE(IsMounted());
  const std::unique_ptr<Engine> engine = Open();
  EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
}

TEST_P(EngineTakeOverTest, MountsStayIfAServiceDoesNotStart) {
  MountRequest request = Request();
  request.writable = true;
  KillEngineAfter([&](Engine& engine) { return engine.Mount(request).ok(); });
  const auto start_services = [this](Engine&) -> absl::StatusOr<std::shared_ptr<void>> {
    std::ofstream(image_.mountpoint() + "/written") << "kept";
    return absl::DataLossError("a damaged file");
  };
  EXPECT_TRUE(absl::IsDataLoss(RunServer({.engine = Options(), .start_services = start_services})));
  ASSERT_TRUE(IsMounted());
  const std::unique_ptr<Engine> engine = Open();
  EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/written"), "kept");
  EXPECT_TRUE(engine->Unmount(image_.mountpoint()).ok());
}

TEST_P(EngineTakeOverTest, MountsThatShareAnImageStillDo) {
  const std::string other = image_.mountpoint() + "-other";
  const std::string third = image_.mountpoint() + "-third";
  for (const std::string& path : {other, third}) std::filesystem::create_directory(path);
  MountRequest request = Request();
  MountRequest writable = request;
  writable.target = other;
  writable.writable = true;
  KillEngineAfter(
      [&](Engine& engine) { return engine.Mount(request).ok() && engine.Mount(writable).ok(); });
  const std::unique_ptr<Engine> engine = Open();
  request.target = third;
  const auto mount = engine->Mount(request);
  ASSERT_TRUE(mount.ok()) << mount.status();
  const uint64_t sharing = GetParam() == Transport::kErofs ? 3 : 1;
  for (const std::string& path : {image_.mountpoint(), other, third}) {
    EXPECT_EQ(Slurp(path + "/data.bin"), image_.data()) << path;
    EXPECT_EQ(engine->Report(path)->front().sharing, sharing);
  }
  for (const std::string& path : {image_.mountpoint(), other, third}) {
    EXPECT_TRUE(engine->Unmount(path).ok()) << path;
  }
  while (!engine->Idle()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(std::filesystem::is_empty(image_.state() + "/mounts"));
}

// One that was unmounted while others shared its image is in use: its directories stay until it is
// known that nobody needs them.
TEST_P(EngineTakeOverTest, DetachedOverlaysKeepTheirDirectories) {
  const std::string other = image_.mountpoint() + "-other";
  std::filesystem::create_directory(other);
  MountRequest plain = Request();
  plain.target = other;
  MountRequest writable = Request();
  writable.writable = true;
  UniqueFd file;
  std::string upper;
  {
    const std::unique_ptr<Engine> engine = Open();
    ASSERT_TRUE(engine->Mount(writable).ok());
    ASSERT_TRUE(engine->Mount(plain).ok());
    upper = engine->Report(image_.mountpoint())->front().mount.upper;
    file = *OpenFile(image_.mountpoint() + "/data.bin", O_RDONLY);
    ASSERT_TRUE(Unmount(image_.mountpoint(), /*detach=*/true).ok());
    engine->ForgetGoneMounts();
    engine->HandOver();
  }
  const std::unique_ptr<Engine> engine = Open();
  EXPECT_TRUE(std::filesystem::exists(upper));
  std::string content(image_.data().size(), '\0');
  ASSERT_TRUE(ReadFull(file.get(), 0, std::as_writable_bytes(std::span(content))).ok());
  EXPECT_EQ(content, image_.data());
  EXPECT_TRUE(engine->Unmount(other).ok());
  EXPECT_FALSE(engine->Idle());
  file.Reset();
  while (!engine->Idle()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(std::filesystem::is_empty(image_.state() + "/mounts"));
}

// Nobody can know which of them is in use.
TEST_P(EngineTakeOverTest, DetachedOverlaysOfAnImageDoNotKeepEachOther) {
  const std::string other = image_.mountpoint() + "-other";
  std::filesystem::create_directory(other);
  UniqueFd files[2];
  {
    const std::unique_ptr<Engine> engine = Open();
    MountRequest request = Request();
    request.writable = true;
    for (const std::string& target : {image_.mountpoint(), other}) {
      request.target = target;
      ASSERT_TRUE(engine->Mount(request).ok());
      files[target == other] = *OpenFile(target + "/data.bin", O_RDONLY);
      ASSERT_TRUE(Unmount(target, /*detach=*/true).ok());
    }
    engine->ForgetGoneMounts();
    engine->HandOver();
  }
  const std::unique_ptr<Engine> engine = Open();
  EXPECT_FALSE(engine->Idle());
  for (const UniqueFd& file : files) {
    std::string content(image_.data().size(), '\0');
    ASSERT_TRUE(ReadFull(file.get(), 0, std::as_writable_bytes(std::span(content))).ok());
    EXPECT_EQ(content, image_.data());
  }
  for (UniqueFd& file : files) file.Reset();
  while (!engine->Idle()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(std::filesystem::is_empty(image_.state() + "/mounts"));
}

TEST_P(EngineTakeOverTest, CleanEndLeavesNothing) {
  {
    const std::unique_ptr<Engine> engine = Open();
    ASSERT_TRUE(engine->Mount(Request()).ok());
  }
  EXPECT_FALSE(IsMounted());
  ReceiveAll();
  EXPECT_TRUE(held_.empty());
  EXPECT_TRUE(std::filesystem::is_empty(image_.state() + "/mounts"));
}

TEST_P(EngineTakeOverTest, DetachedMountIsServedToItsLastReader) {
  UniqueFd file;
  {
    const std::unique_ptr<Engine> engine = Open();
    ASSERT_TRUE(engine->Mount(Request()).ok());
    file = *OpenFile(image_.mountpoint() + "/data.bin", O_RDONLY);
    engine->HandOver();
  }
  ASSERT_TRUE(Unmount(image_.mountpoint(), /*detach=*/true).ok());
  for (int life = 0; life < 2; ++life) {
    const std::unique_ptr<Engine> engine = Open();
    EXPECT_FALSE(engine->HasMounts());
    EXPECT_TRUE(engine->HasDetachedMounts());
    EXPECT_FALSE(engine->Idle());
    std::string content(image_.data().size(), '\0');
    ASSERT_TRUE(ReadFull(file.get(), 0, std::as_writable_bytes(std::span(content))).ok());
    EXPECT_EQ(content, image_.data());
    engine->HandOver();
  }
  file.Reset();
  const std::unique_ptr<Engine> engine = Open();
  while (!engine->Idle()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(std::filesystem::is_empty(image_.state() + "/mounts"));
}

TEST_P(EngineTakeOverTest, MountWhoseDescriptorIsLostIsUnmounted) {
  KillEngineAfter([&](Engine& engine) { return engine.Mount(Request()).ok(); });
  ReceiveAll();
  held_.clear();
  const std::unique_ptr<Engine> engine = Open();
  EXPECT_FALSE(IsMounted());
  EXPECT_TRUE(engine->Unmount(image_.mountpoint()).ok());  // what the user wants to be sure of
  EXPECT_TRUE(engine->Mount(Request()).ok());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
}

TEST_P(EngineTakeOverTest, RequestThatComesAgainWithItsTokenSucceeds) {
  MountRequest request = Request();
  request.token = "0123";
  KillEngineAfter([&](Engine& engine) { return engine.Mount(request).ok(); });
  const std::unique_ptr<Engine> engine = Open();
  EXPECT_TRUE(engine->Mount(request).ok());
  request.token = "4567";
  EXPECT_TRUE(absl::IsAlreadyExists(engine->Mount(request).status()));
}

TEST_P(EngineTakeOverTest, DescriptorsOfNoMountAreClosed) {
  held_.emplace("fuse-99", *OpenFile("/dev/fuse", O_RDWR));
  const std::unique_ptr<Engine> engine = Open();
  ReceiveAll();
  EXPECT_TRUE(held_.empty());
}

INSTANTIATE_TEST_SUITE_P(Transports, EngineTakeOverTest,
                         ::testing::Values(Transport::kErofs, Transport::kFuse),
                         [](const auto& info) { return std::string(TransportName(info.param)); });

}  // namespace
}  // namespace lamina::fs
