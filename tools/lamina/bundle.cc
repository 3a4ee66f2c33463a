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
#include "backends/record.h"
#include "fs/engine/client.h"
#include "tools/lamina/commands.h"

namespace lamina::cli {
namespace {

constexpr const char* kParent = "/run";
constexpr std::string_view kPrefix = "lamina-run-";
constexpr int kAttempts = 10;

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
    absl::StatusOr<UniqueFd> lock = backends::LockDirectory(directory.path());
    // Before the lock, another process may take the directory for stale.
    if (!lock.ok()) continue;
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
    const absl::StatusOr<UniqueFd> lock = backends::LockDirectory(path);
    if (!lock.ok()) continue;
    backends::DeleteContainer(path.substr(path.rfind('/') + 1));
    const std::string rootfs = path + "/rootfs";
    if (const absl::StatusOr<std::string> state = fs::StateOfMount(rootfs); state.ok()) {
      fs::Client(*state, ProgramPath()).Unmount(rootfs).IgnoreError();
    }
    // If that did not help. The engine notices that the mount is gone.
    ::umount2(rootfs.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW);
    Remove(path);
  }
}

}  // namespace lamina::cli
