// SPDX-License-Identifier: Apache-2.0
#include "tools/lamina/bundle.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <vector>

#include "backends/crun.h"
#include "fs/engine/client.h"
#include "tools/lamina/commands.h"

namespace lamina::cli {
namespace {

constexpr const char* kParent = "/run";
constexpr std::string_view kPrefix = "lamina-run-";
constexpr int kAttempts = 10;

// An exclusive lock on the directory, if nobody else has one and it is still there.
std::optional<UniqueFd> Lock(const std::string& path) {
  absl::StatusOr<UniqueFd> fd = OpenFile(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!fd.ok() || !TryLock(fd->get()).value_or(false)) return std::nullopt;
  struct stat by_fd {};
  struct stat by_path {};
  if (::fstat(fd->get(), &by_fd) != 0 || ::lstat(path.c_str(), &by_path) != 0 ||
      by_fd.st_dev != by_path.st_dev || by_fd.st_ino != by_path.st_ino) {
    return std::nullopt;
  }
  return *std::move(fd);
}

// A mount on rootfs keeps it, so that nothing is ever removed through one.
void Remove(const std::string& path) {
  if (::rmdir((path + "/rootfs").c_str()) != 0 && errno != ENOENT) return;
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

}  // namespace

absl::StatusOr<Bundle> Bundle::Create() {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    ASSIGN_OR_RETURN(TemporaryDirectory directory, TemporaryDirectory::Create(kParent, kPrefix));
    std::optional<UniqueFd> lock = Lock(directory.path());
    // Before the lock, another process may take the directory for stale.
    if (!lock.has_value()) continue;
    Bundle bundle(directory.Keep(), *std::move(lock));
    const std::string rootfs = bundle.rootfs();
    if (::mkdir(rootfs.c_str(), 0755) != 0) return ErrnoStatus(errno, "create " + rootfs);
    return bundle;
  }
  return absl::UnavailableError(
      fmt::format("{}/{}...: other processes keep removing it", kParent, kPrefix));
}

Bundle::~Bundle() {
  if (!path_.empty()) Remove(path_);
}

void RemoveStaleBundles() {
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(kParent, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().filename().string().starts_with(kPrefix)) paths.push_back(entry->path());
  }
  for (const std::string& path : paths) {
    const std::optional<UniqueFd> lock = Lock(path);
    if (!lock.has_value()) continue;
    backends::DeleteContainer(path.substr(path.rfind('/') + 1));
    const std::string rootfs = path + "/rootfs";
    if (const std::optional<std::string> state = fs::StateOfMount(rootfs)) {
      fs::Client(*state, ProgramPath()).Unmount(rootfs).IgnoreError();
    }
    // If that did not help. The engine notices that the mount is gone.
    ::umount2(rootfs.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW);
    Remove(path);
  }
}

}  // namespace lamina::cli
