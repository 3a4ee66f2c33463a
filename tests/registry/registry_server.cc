// SPDX-License-Identifier: Apache-2.0
#include "tests/registry/registry_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

extern char** environ;

namespace lamina::registry {
namespace {

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

uint16_t FreePort() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof(address);
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  EXPECT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  return ntohs(address.sin_port);
}

bool Answers(uint16_t port) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = Loopback(port);
  return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

pid_t Spawn(const std::string& config, const std::string& log) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    ::posix_spawn_file_actions_addopen(&actions, fd, log.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                       0600);
  }
  const char* arguments[] = {"docker-registry", "serve", config.c_str(), nullptr};
  pid_t pid = -1;
  const int error =
      ::posix_spawnp(&pid, arguments[0], &actions, nullptr, const_cast<char**>(arguments), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  EXPECT_EQ(error, 0) << "docker-registry cannot be started";
  return pid;
}

void WriteTo(const std::string& path, const std::string& content) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << content;
}

}  // namespace

std::unique_ptr<RegistryServer> RegistryServer::Start() {
  absl::StatusOr<TemporaryDirectory> directory =
      TemporaryDirectory::Create(testing::TempDir(), "lamina-registry-");
  EXPECT_TRUE(directory.ok()) << directory.status();
  const uint16_t port = FreePort();
  const std::string config = directory->path() + "/config.yml";
  WriteTo(config, fmt::format(R"({{"version": "0.1", "log": {{"level": "error"}},
      "storage": {{"filesystem": {{"rootdirectory": "{}/data"}}}},
      "http": {{"addr": "127.0.0.1:{}"}}}})",
                              directory->path(), port));
  const pid_t pid = Spawn(config, directory->path() + "/log");
  for (int i = 0; i < 1000 && !Answers(port); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(Answers(port));
  return std::unique_ptr<RegistryServer>(
      new RegistryServer(*std::move(directory), pid, fmt::format("127.0.0.1:{}", port)));
}

RegistryServer::~RegistryServer() {
  ::kill(pid_, SIGKILL);
  int status = 0;
  ::waitpid(pid_, &status, 0);
}

std::string RegistryServer::DataPath(const Digest& digest) const {
  return fmt::format("{}/data/docker/registry/v2/blobs/sha256/{}/{}/data", directory_.path(),
                     digest.Hex().substr(0, 2), digest.Hex());
}

void RegistryServer::Put(const Digest& digest, const std::string& content) {
  WriteTo(DataPath(digest), content);
  WriteTo(fmt::format("{}/data/docker/registry/v2/repositories/test/_layers/sha256/{}/link",
                      directory_.path(), digest.Hex()),
          digest.ToString());
}

void RegistryServer::Truncate(const Digest& digest, uint64_t size) {
  std::filesystem::resize_file(DataPath(digest), size);
}

void RegistryServer::Remove(const Digest& digest) { std::filesystem::remove(DataPath(digest)); }

}  // namespace lamina::registry
