// SPDX-License-Identifier: Apache-2.0
#include "fs/control/acceptor.h"

#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "fs/engine/socket.h"

namespace lamina::fs {
namespace {

using std::chrono::milliseconds;

// While it lives this process can open no more descriptors.
class NoDescriptorsLeft {
 public:
  NoDescriptorsLeft() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const UniqueFd next(::dup(STDERR_FILENO));
    const rlimit none{.rlim_cur = static_cast<rlim_t>(next.get()), .rlim_max = before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoDescriptorsLeft() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptorsLeft(const NoDescriptorsLeft&) = delete;
  NoDescriptorsLeft& operator=(const NoDescriptorsLeft&) = delete;

 private:
  rlimit before_{};
};

milliseconds ProcessorTime() {
  timespec used{};
  EXPECT_EQ(::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used), 0);
  return milliseconds(used.tv_sec * 1000 + used.tv_nsec / 1'000'000);
}

TEST(AcceptorTest, WithoutDescriptorsItWaits) {
  const auto directory = TemporaryDirectory::Create("/tmp", "lamina-acceptor-test-");
  ASSERT_TRUE(directory.ok());
  absl::StatusOr<UniqueFd> listener = ListenUnix(directory->path(), "sock");
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::atomic<int> accepted = 0;
  Acceptor acceptor(*std::move(listener), [&accepted](const UniqueFd&) { ++accepted; });
  ASSERT_TRUE(acceptor.Start("test").ok());

  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = directory->path() + "/sock";
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  const UniqueFd client(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // UndefinedBehaviorSanitizer needs descriptors to look at the type of an object for the first time.
  spdlog::warn("an acceptor without descriptors says so once");
  {
    const NoDescriptorsLeft none;
    ASSERT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const milliseconds before = ProcessorTime();
    std::this_thread::sleep_for(milliseconds(400));
    EXPECT_LT(ProcessorTime() - before, milliseconds(200));
    EXPECT_EQ(accepted, 0);
  }
  for (int turn = 0; turn < 500 && accepted == 0; ++turn) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(accepted, 1);
}

}  // namespace
}  // namespace lamina::fs
