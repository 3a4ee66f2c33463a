// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "tests/mount/mount_testing.h"

namespace lamina::fs {
namespace {

using chunkstore::RandomBytes;
using chunkstore::TextBytes;

void WriteFile(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

void AddFilesOfAllSizes(const std::string& directory) {
  ::mkdir((directory + "/sizes").c_str(), 0755);
  for (const size_t boundary : {4096, 256 * 1024, 1024 * 1024, 3 * 1024 * 1024}) {
    for (const int difference : {-1, 0, 1}) {
      const size_t size = boundary + static_cast<size_t>(difference);
      const std::string path = fmt::format("{}/sizes/{}", directory, size);
      WriteFile(path, size % 2 == 0 ? TextBytes(size, size) : RandomBytes(size, size));
    }
  }
  WriteFile(directory + "/sizes/0", "");
  WriteFile(directory + "/sizes/1", "x");
}

void AddSparseFiles(const std::string& directory) {
  const std::string path = directory + "/sparse";
  WriteFile(path, "");
  ASSERT_EQ(::truncate(path.c_str(), 9 * 1024 * 1024 + 7), 0);
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  const std::string data = RandomBytes(300'000, 7);
  ASSERT_TRUE(WriteFull(fd.get(), 1024 * 1024, AsBytes(data)).ok());
  ASSERT_TRUE(WriteFull(fd.get(), 5 * 1024 * 1024, AsBytes(data)).ok());
  WriteFile(directory + "/only-a-hole", "");
  ASSERT_EQ(::truncate((directory + "/only-a-hole").c_str(), 1 << 20), 0);
}

void AddSpecialFiles(const std::string& directory) {
  const auto path = [&](const char* name) { return directory + "/" + name; };
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0640), 0);
  ASSERT_EQ(::mknod(path("null").c_str(), S_IFCHR | 0666, makedev(1, 3)), 0);
  ASSERT_EQ(::mknod(path("block").c_str(), S_IFBLK | 0660, makedev(259, 70000)), 0);
  ASSERT_EQ(::symlink("sizes/4096", path("link").c_str()), 0);
  ASSERT_EQ(::symlink(std::string(4000, 'l').c_str(), path("long-link").c_str()), 0);
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX};
  ASSERT_LT(path("socket").size(), sizeof(address.sun_path));
  std::strcpy(address.sun_path, path("socket").c_str());
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
}

void AddNames(const std::string& directory) {
  ::mkdir((directory + "/names").c_str(), 0755);
  WriteFile(directory + "/names/" + std::string(255, 'n'), "long");
  WriteFile(directory + "/names/\xff\xfe not utf-8", "bytes");
  WriteFile(directory + "/names/line\nbreak", "newline");
  for (int i = 0; i < 1000; ++i) {
    WriteFile(fmt::format("{}/names/{:05}", directory, i), fmt::format("{}", i));
  }
}

void AddAttributes(const std::string& directory) {
  const auto path = [&](const char* name) { return directory + "/" + name; };
  WriteFile(path("setuid"), "#!/bin/true\n");
  ASSERT_EQ(::chown(path("setuid").c_str(), 70000, 3'000'000'000), 0);
  ASSERT_EQ(::chmod(path("setuid").c_str(), 06755), 0);
  ::mkdir(path("sticky").c_str(), 0);
  ASSERT_EQ(::chmod(path("sticky").c_str(), 01777), 0);
  WriteFile(path("xattrs"), "with attributes");
  for (const char* name : {"user.comment", "user.empty", "trusted.secret"}) {
    const std::string value = std::strcmp(name, "user.empty") == 0 ? "" : std::string(name) + "=";
    ASSERT_EQ(::setxattr(path("xattrs").c_str(), name, value.data(), value.size(), 0), 0) << name;
  }
  WriteFile(path("acl"), "with an access list");
  ::mkdir(path("acl-directory").c_str(), 0750);
  Shell(
      fmt::format("cd '{}' && setcap cap_net_raw+ep xattrs && setfacl -m u:1234:r,g:99:rw acl && "
                  "setfacl -m u:1234:rx -m d:u:1234:rwx acl-directory",
                  directory));
  const timespec times[2] = {{0, 123456789}, {-86400, 987654321}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path("acl").c_str(), times, 0), 0);
}

void AddHardLinks(const std::string& directory) {
  ::mkdir((directory + "/other").c_str(), 0755);
  WriteFile(directory + "/linked", TextBytes(10'000, 1));
  ASSERT_EQ(::link((directory + "/linked").c_str(), (directory + "/other/name").c_str()), 0);
  ASSERT_EQ(::link((directory + "/linked").c_str(), (directory + "/other/again").c_str()), 0);
}

}  // namespace

void MakeSampleTree(const std::string& directory) {
  AddFilesOfAllSizes(directory);
  AddSparseFiles(directory);
  AddSpecialFiles(directory);
  AddNames(directory);
  AddAttributes(directory);
  AddHardLinks(directory);
}

}  // namespace lamina::fs
