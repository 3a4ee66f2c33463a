// SPDX-License-Identifier: Apache-2.0
#include "tests/backends/sandbox_testing.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "fs/image/convert.h"
#include "fs/mount/mount.h"

namespace lamina::backends {
namespace {

void Check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

TemporaryDirectory MakeDirectory() {
  absl::StatusOr<TemporaryDirectory> directory =
      TemporaryDirectory::Create(testing::TempDir(), "lamina-box-");
  Check(directory.status());
  return *std::move(directory);
}

std::string DirectoryOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

void ListDirectories(const std::string& directory, std::vector<std::string>& found) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->is_directory(error)) found.push_back(entry->path());
  }
}

std::vector<std::string> ControlGroups() {
  std::vector<std::string> found;
  for (const char* tree : {"", "/memory", "/pids", "/freezer", "/systemd", "/cpuset", "/blkio"}) {
    ListDirectories(fmt::format("/sys/fs/cgroup{}/lamina", tree), found);
  }
  return found;
}

}  // namespace

int Repetitions(int count) {
  const char* factor = std::getenv("LAMINA_SOAK");
  return factor == nullptr || *factor == 0 ? count : count * std::atoi(factor);
}

TestMachine::TestMachine()
    : directory_(MakeDirectory()),
      options_{.state = directory_.path() + "/state",
               .program = LAMINA_PROGRAM,
               .helpers = DirectoryOf(LAMINA_PROGRAM)},
      launcher_(options_) {
  const std::string root = path("root");
  for (const char* name :
       {"", "/bin", "/etc", "/tmp", "/proc", "/dev", "/sys", "/home", "/home/app", "/private"}) {
    std::filesystem::create_directory(root + name);
  }
  ::chmod((root + "/tmp").c_str(), 01777);
  ::chmod((root + "/private").c_str(), 0700);
  ::chown((root + "/home/app").c_str(), 1234, 1235);
  std::filesystem::copy_file("/bin/busybox", root + "/bin/busybox");
  for (const char* name :
       {"sh",     "cat",   "echo",  "env",    "id",       "kill",  "ls",   "mkdir",
        "mkfifo", "mknod", "pwd",   "sleep",  "true",     "false", "yes",  "dd",
        "tail",   "head",  "wc",    "chmod",  "stat",     "ln",    "rm",   "mount",
        "umount", "nc",    "seq",   "setsid", "hostname", "ip",    "ps",   "ipcs",
        "cp",     "touch", "chown", "usleep", "test",     "tr",    "grep", "date"}) {
    std::filesystem::create_symlink("busybox", root + "/bin/" + name);
  }
  Check(WriteFileAtomically(root + "/etc/passwd",
                            "root:x:0:0:root:/root:/bin/sh\n"
                            "app:x:1234:1235:app:/home/app:/bin/sh\n"));
  Check(WriteFileAtomically(root + "/etc/group", "root:x:0:\napp:x:1235:\n"));
  Check(WriteFileAtomically(root + "/etc/hostname", "image\n"));
  Check(fs::Convert({.source = "dir:" + root, .destination = image()}).status());
  const std::vector<std::string> groups = ControlGroups();
  others_ = {groups.begin(), groups.end()};
}

TestMachine::~TestMachine() {
  const absl::StatusOr<std::vector<ListedSandbox>> left = launcher_.List();
  if (left.ok()) {
    for (const ListedSandbox& listed : *left) {
      launcher_.Remove(listed.record.id).IgnoreError();
    }
  }
}

std::vector<std::string> TestMachine::Leftovers() const {
  std::vector<std::string> found;
  ListDirectories(SandboxesDirectory(options_), found);
  for (const std::string& group : ControlGroups()) {
    if (!others_.contains(group)) found.push_back(group);
  }
  const auto mounts = fs::ReadMountInfo();
  if (mounts.ok()) {
    for (const fs::MountInfo& mount : *mounts) {
      if (mount.target.find("/sandboxes/") != std::string::npos &&
          mount.target.starts_with(directory_.path())) {
        found.push_back("mount " + mount.target);
      }
    }
  }
  return found;
}

}  // namespace lamina::backends
