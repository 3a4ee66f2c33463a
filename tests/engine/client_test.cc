// SPDX-License-Identifier: Apache-2.0
//
// The engine as a process of its own, as the command line uses it.
#include "fs/engine/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <thread>
#include <vector>

#include "fs/engine/socket.h"
#include "fs/mount/mount.h"
#include "tests/engine/test_image.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;

class ClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "mounting without fusermount3 needs root";
  }
  void TearDown() override { client_.Unmount(image_.mountpoint()).IgnoreError(); }

  MountRequest Request() const {
    return {.image = image_.reference(), .target = image_.mountpoint()};
  }
  bool EngineRuns() const { return ConnectUnix(image_.state(), kControlSocket).ok(); }

  TestImage image_;
  Client client_{image_.state(), LAMINA_PROGRAM};
};

TEST_F(ClientTest, EngineComesWithTheFirstMountAndGoesWithTheLast) {
  EXPECT_FALSE(EngineRuns());
  const absl::StatusOr<nlohmann::json> mount = client_.Mount(Request());
  ASSERT_TRUE(mount.ok()) << mount.status();
  EXPECT_EQ(mount->value("transport", ""), "erofs");
  EXPECT_TRUE(EngineRuns());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
  ASSERT_TRUE(client_.Unmount(image_.mountpoint()).ok());
  EXPECT_FALSE(EngineRuns());
  EXPECT_FALSE(std::filesystem::exists(image_.state() + "/" + kControlSocket));
}

TEST_F(ClientTest, FailureCrossesTheSocketWithItsText) {
  MountRequest request = Request();
  request.image += "-missing";
  const absl::Status status = client_.Mount(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("test-missing"));
}

TEST_F(ClientTest, ReportWithoutAnEngineIsEmptyAndStartsNone) {
  const absl::StatusOr<nlohmann::json> report = client_.Report(std::nullopt);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->empty());
  EXPECT_FALSE(EngineRuns());
}

TEST_F(ClientTest, StateDirectoryIsFoundFromTheMount) {
  for (const Transport transport : {Transport::kErofs, Transport::kFuse}) {
    for (const bool writable : {false, true}) {
      MountRequest request = Request();
      request.transport = transport;
      request.writable = writable;
      ASSERT_TRUE(client_.Mount(request).ok());
      EXPECT_EQ(StateOfMount(image_.mountpoint()).value_or("none"), image_.state())
          << TransportName(transport) << (writable ? " writable" : "");
      ASSERT_TRUE(client_.Unmount(image_.mountpoint()).ok());
    }
  }
  EXPECT_TRUE(absl::IsNotFound(StateOfMount("/proc").status()));
}

TEST_F(ClientTest, ManyClientsShareOneEngine) {
  constexpr int kClients = 16;
  std::vector<std::string> targets;
  for (int i = 0; i < kClients; ++i) {
    targets.push_back(fmt::format("{}-{}", image_.mountpoint(), i));
    ASSERT_TRUE(std::filesystem::create_directory(targets.back()));
  }
  std::vector<std::thread> threads;
  for (const std::string& target : targets) {
    threads.emplace_back([this, target] {
      Client client(image_.state(), LAMINA_PROGRAM);
      MountRequest request = Request();
      request.target = target;
      const absl::StatusOr<nlohmann::json> mount = client.Mount(request);
      EXPECT_TRUE(mount.ok()) << mount.status();
      EXPECT_EQ(Slurp(target + "/hello.txt"), image_.hello());
      const absl::Status unmounted = client.Unmount(target);
      EXPECT_TRUE(unmounted.ok()) << unmounted;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(EngineRuns());
}

TEST_F(ClientTest, EngineThatCannotStartSaysWhy) {
  Client client("/proc/no-such-directory/state", LAMINA_PROGRAM);
  const absl::Status status = client.Mount(Request()).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("/proc/no-such-directory"));
}

}  // namespace
}  // namespace lamina::fs
