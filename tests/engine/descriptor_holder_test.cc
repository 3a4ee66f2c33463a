// SPDX-License-Identifier: Apache-2.0
//
// The protocols are those of sd_notify(3) and sd_listen_fds(3); the test plays systemd.
#include "fs/engine/descriptor_holder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "chunkstore/base/descriptor_message.h"

namespace lamina::fs {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A message as systemd receives it.
DescriptorMessage Receive(int socket) {
  return ReceiveDescriptorMessage(socket, MSG_DONTWAIT).value_or(DescriptorMessage{});
}

ino_t InodeOf(int fd) {
  struct stat info {};
  EXPECT_EQ(::fstat(fd, &info), 0);
  return info.st_ino;
}

class NotifyTest : public ::testing::TestWithParam<bool> {
 protected:
  // A datagram socket where $NOTIFY_SOCKET says, by path or in the abstract name space.
  void SetUp() override {
    auto directory = TemporaryDirectory::Create("/tmp", "lamina-notify-test-");
    ASSERT_TRUE(directory.ok());
    directory_.emplace(*std::move(directory));
    std::string name = directory_->path() + "/notify";
    if (GetParam()) name[0] = '@';
    ::setenv("NOTIFY_SOCKET", name.c_str(), 1);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    if (GetParam()) address.sun_path[0] = '\0';
    systemd_.Reset(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
    ASSERT_EQ(::bind(systemd_.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  }

  std::optional<TemporaryDirectory> directory_;
  UniqueFd systemd_;
};

TEST_P(NotifyTest, DescriptorsGoToTheHolderAndAreRemovedByName) {
  auto notify = NotifySocket::FromEnvironment();
  ASSERT_TRUE(notify.ok()) << notify.status();
  EXPECT_EQ(std::getenv("NOTIFY_SOCKET"), nullptr);  // not for programs that we start
  const DescriptorHolder holder({}, *std::move(notify));
  const UniqueFd file(::open("/", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(holder.Store("fuse-7", file.get()).ok());
  ASSERT_TRUE(holder.Remove("fuse-7").ok());
  ASSERT_TRUE(holder.Ready().ok());

  const DescriptorMessage store = Receive(systemd_.get());
  EXPECT_EQ(store.text, "FDSTORE=1\nFDNAME=fuse-7");
  ASSERT_EQ(store.fds.size(), 1);
  EXPECT_EQ(InodeOf(store.fds[0].get()), InodeOf(file.get()));
  const DescriptorMessage remove = Receive(systemd_.get());
  EXPECT_EQ(remove.text, "FDSTOREREMOVE=1\nFDNAME=fuse-7");
  EXPECT_TRUE(remove.fds.empty());
  EXPECT_EQ(Receive(systemd_.get()).text, "READY=1");
}

INSTANTIATE_TEST_SUITE_P(Names, NotifyTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Abstract" : "Path"; });

TEST(NotifySocket, WithoutAHolderNothingIsSent) {
  ::unsetenv("NOTIFY_SOCKET");
  const auto notify = NotifySocket::FromEnvironment();
  ASSERT_TRUE(notify.ok());
  EXPECT_FALSE(notify->valid());
  EXPECT_TRUE(notify->Send("READY=1").ok());
}

TEST(NotifySocket, OtherKindsOfSocketsAreRefusedByName) {
  ::setenv("NOTIFY_SOCKET", "vsock:2:1234", 1);
  EXPECT_THAT(std::string(NotifySocket::FromEnvironment().status().message()),
              ::testing::HasSubstr("vsock:2:1234"));
}

// In a process of its own, because descriptors 3, 4, ... are inherited.
int InChild(const std::function<bool()>& check) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(check() ? 0 : 1);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST(InheritedDescriptors, ComeWithTheirNames) {
  const auto check = [] {
    const UniqueFd a(::open("/", O_RDONLY));
    const UniqueFd b(::open("/tmp", O_RDONLY));
    const ino_t inodes[] = {InodeOf(a.get()), InodeOf(b.get())};
    const int high_a = ::fcntl(a.get(), F_DUPFD, 100);
    const int high_b = ::fcntl(b.get(), F_DUPFD, 100);
    ::dup2(high_a, 3);
    ::dup2(high_b, 4);
    ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", "2", 1);
    ::setenv("LISTEN_FDNAMES", "control:fuse-1", 1);
    auto inherited = InheritedDescriptors();
    if (!inherited.ok() || std::getenv("LISTEN_FDS") != nullptr) return false;
    DescriptorHolder holder(*std::move(inherited), NotifySocket());
    if (holder.names() != std::vector<std::string>{"control", "fuse-1"}) return false;
    const UniqueFd control = holder.Take("control");
    if (holder.Take("control").valid() || holder.Take("other").valid()) return false;
    const UniqueFd fuse = holder.Take("fuse-1");
    return InodeOf(control.get()) == inodes[0] && InodeOf(fuse.get()) == inodes[1] &&
           (::fcntl(fuse.get(), F_GETFD) & FD_CLOEXEC) != 0;
  };
  EXPECT_EQ(InChild(check), 0);
}

TEST(DescriptorHolder, SeveralMayHaveOneName) {
  std::multimap<std::string, UniqueFd> descriptors;
  std::vector<int> controls;
  for (const char* name : {"control", "fuse", "control", "controls"}) {
    UniqueFd fd(::open("/", O_RDONLY | O_CLOEXEC));
    if (name == std::string_view("control")) controls.push_back(fd.get());
    descriptors.emplace(name, std::move(fd));
  }
  DescriptorHolder holder(std::move(descriptors), NotifySocket());
  std::vector<int> taken;
  const std::vector<UniqueFd> owners = holder.TakeAll("control");
  for (const UniqueFd& fd : owners) taken.push_back(fd.get());
  EXPECT_EQ(taken, controls);
  EXPECT_FALSE(holder.Take("control").valid());
  EXPECT_THAT(holder.names(), ElementsAre("controls", "fuse"));
}

TEST(InheritedDescriptors, ThoseOfAnotherProcessAreNotTouched) {
  ::setenv("LISTEN_PID", "1", 1);
  ::setenv("LISTEN_FDS", "3", 1);
  const auto inherited = InheritedDescriptors();
  ASSERT_TRUE(inherited.ok());
  EXPECT_THAT(*inherited, IsEmpty());
}

TEST(InheritedDescriptors, NumbersThatAreNoneAreRefused) {
  for (const char* count : {"", "x", "-1", "4000000000", "1000000"}) {
    const auto check = [count] {
      ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
      ::setenv("LISTEN_FDS", count, 1);
      return !InheritedDescriptors().ok();
    };
    EXPECT_EQ(InChild(check), 0) << count;
  }
}

}  // namespace
}  // namespace lamina::fs
