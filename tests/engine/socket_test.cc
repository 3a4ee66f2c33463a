// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <filesystem>
#include <thread>

namespace lamina::fs {
namespace {

struct Pair {
  UniqueFd left;
  UniqueFd right;
};

Pair Connected() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

TEST(Socket, LineArrivesWhole) {
  Pair pair = Connected();
  const std::string line(1 << 20, 'x');
  std::thread writer([&] { EXPECT_TRUE(WriteLine(pair.left.get(), line).ok()); });
  const absl::StatusOr<std::string> got = ReadLine(pair.right.get());
  writer.join();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(*got, line);
}

TEST(Socket, ClosingInTheMiddleOfALineIsUnavailable) {
  Pair pair = Connected();
  ASSERT_EQ(::send(pair.left.get(), "half", 4, 0), 4);
  pair.left.Reset();
  EXPECT_EQ(ReadLine(pair.right.get()).status().code(), absl::StatusCode::kUnavailable);
}

TEST(Socket, LineWithoutEndIsRefused) {
  Pair pair = Connected();
  std::thread writer([&] {
    const std::string chunk(1 << 20, 'x');
    while (::send(pair.left.get(), chunk.data(), chunk.size(), MSG_NOSIGNAL) > 0) {
    }
  });
  EXPECT_EQ(ReadLine(pair.right.get()).status().code(), absl::StatusCode::kResourceExhausted);
  pair.right.Reset();
  writer.join();
}

TEST(Socket, OnlySocketsAreReplaced) {
  const absl::StatusOr<TemporaryDirectory> directory =
      TemporaryDirectory::Create("/tmp", "lamina-socket-test-");
  ASSERT_TRUE(directory.ok()) << directory.status();
  for (const char* name : {"file", "other.new"}) {
    ASSERT_TRUE(WriteFileAtomically(directory->path() + "/" + name, "text").ok());
  }
  for (const char* name : {"file", "other"}) {
    EXPECT_EQ(ListenUnix(directory->path(), name).status().code(),
              absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(CheckListenUnix(directory->path(), name).code(), absl::StatusCode::kAlreadyExists);
  }
  EXPECT_EQ(*ReadFileToString(directory->path() + "/file", 10), "text");
  ASSERT_TRUE(ListenUnix(directory->path(), "socket").ok());
  EXPECT_TRUE(CheckListenUnix(directory->path(), "socket").ok());
  EXPECT_TRUE(ListenUnix(directory->path(), "socket").ok());
  EXPECT_FALSE(CheckListenUnix(directory->path() + "/none", "socket").ok());
  EXPECT_FALSE(CheckListenUnix(directory->path(), std::string(81, 'n')).ok());
}

TEST(Socket, PathMayBeLongerThanAnAddressAllows) {
  const absl::StatusOr<TemporaryDirectory> directory =
      TemporaryDirectory::Create("/tmp", "lamina-socket-test-");
  ASSERT_TRUE(directory.ok()) << directory.status();
  const std::string deep = directory->path() + "/" + std::string(200, 'd');
  ASSERT_TRUE(std::filesystem::create_directory(deep));
  const absl::StatusOr<UniqueFd> listener = ListenUnix(deep, kControlSocket);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(ConnectUnix(deep, kControlSocket).ok());
}

TEST(Socket, OnlyTheOwnerMayConnect) {
  const absl::StatusOr<TemporaryDirectory> directory =
      TemporaryDirectory::Create("/tmp", "lamina-socket-test-");
  ASSERT_TRUE(directory.ok()) << directory.status();
  const absl::StatusOr<UniqueFd> listener = ListenUnix(directory->path(), kControlSocket);
  ASSERT_TRUE(listener.ok()) << listener.status();
  struct stat info {};
  ASSERT_EQ(::stat((directory->path() + "/" + kControlSocket).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST(Socket, NobodyListeningIsUnavailable) {
  const absl::StatusOr<TemporaryDirectory> directory =
      TemporaryDirectory::Create("/tmp", "lamina-socket-test-");
  ASSERT_TRUE(directory.ok()) << directory.status();
  EXPECT_EQ(ConnectUnix(directory->path(), kControlSocket).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace lamina::fs
