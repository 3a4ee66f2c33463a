// SPDX-License-Identifier: Apache-2.0
#include "backends/sandbox_directory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <future>
#include <utility>

#include "backends/cgroup.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/program.h"
#include "chunkstore/base/remove_tree.h"
#include "fs/engine/client.h"
#include "fs/engine/messages.h"
#include "fs/mount/loop.h"
#include "fs/mount/mount.h"

namespace lamina::backends {
namespace {

absl::Status MakeDirectory(const std::string& path, mode_t mode) {
  if (::mkdir(path.c_str(), mode) != 0) return ErrnoStatus(errno, "make directory " + path);
  return absl::OkStatus();
}

absl::Status MountDisk(const std::string& directory, uint64_t bytes) {
  const std::string image = directory + "/disk.img";
  RETURN_IF_ERROR(MakeDiskImage(image, bytes));
  ASSIGN_OR_RETURN(const fs::LoopDevice loop, fs::LoopDevice::Attach(image, /*writable=*/true));
  const std::string disk = directory + "/disk";
  if (::mount(loop.path().c_str(), disk.c_str(), "ext4", MS_NOATIME | MS_NOSUID | MS_NODEV,
              nullptr) != 0) {
    return ErrnoStatus(errno, fmt::format("mount {} on {}", loop.path(), disk));
  }
  return absl::OkStatus();
}

// Not where it is, so that it can be removed while this one is in use.
absl::Status LinkSnapshot(const std::string& from, const std::string& to) {
  std::error_code error;
  std::filesystem::copy(
      from, to,
      std::filesystem::copy_options::recursive | std::filesystem::copy_options::create_hard_links,
      error);
  if (error) return ErrnoStatus(error.value(), fmt::format("link {} to {}", from, to));
  return absl::OkStatus();
}

}  // namespace

fs::Client EngineClient(const LauncherOptions& options) {
  return fs::Client(options.state, options.program, options.engine_options);
}

std::string SandboxesDirectory(const LauncherOptions& options) {
  return options.state + "/sandboxes";
}
std::string SnapshotsDirectory(const LauncherOptions& options) {
  return options.state + "/sandbox-snapshots";
}

absl::Status MakeDiskImage(const std::string& path, uint64_t bytes) {
  constexpr uint64_t kLeast = 4 << 20;
  if (bytes < kLeast) {
    return absl::InvalidArgumentError(fmt::format("a disk has {} bytes at least", kLeast));
  }
  {
    ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(path, O_RDWR | O_CREAT | O_EXCL, 0600));
    if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
      return ErrnoStatus(errno, "make " + path);
    }
  }
  // No journal and no reserve: it lives no longer than its sandbox.
  return RunProgram({"mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", "-m", "0", "-E",
                     "lazy_itable_init=1,nodiscard,root_owner=0:0", path});
}

namespace {

absl::StatusOr<fs::MountDescription> MountAt(const LauncherOptions& options,
                                             const std::string& directory,
                                             fs::MountRequest request) {
  request.target = directory + "/rootfs";
  RETURN_IF_ERROR(MakeDirectory(request.target, 0755));
  ASSIGN_OR_RETURN(const nlohmann::json mount, EngineClient(options).Mount(request));
  return fs::ParseMountDescription(mount);
}

}  // namespace

absl::StatusOr<fs::MountDescription> MountImage(const LauncherOptions& options,
                                                const std::string& directory, const Record& record,
                                                const registry::Settings& registry) {
  return MountAt(options, directory,
                 {.image = record.image, .layer_images = record.layers, .registry = registry});
}

absl::StatusOr<fs::MountDescription> MountRootfs(const LauncherOptions& options,
                                                 const std::string& directory, const Record& record,
                                                 const registry::Settings& registry,
                                                 uint64_t disk_bytes) {
  const std::string disk = directory + "/disk";
  RETURN_IF_ERROR(MakeDirectory(disk, 0700));
  if (disk_bytes > 0) {
    RETURN_IF_ERROR(MountDisk(directory, disk_bytes), "disk of {} bytes", disk_bytes);
  }
  std::vector<std::string> layers = record.layers;
  if (!record.from_snapshot.empty()) {
    const std::string from = SnapshotsDirectory(options) + "/" + record.from_snapshot;
    const std::string own = directory + "/snapshot";
    RETURN_IF_ERROR(LinkSnapshot(from + "/image", own), "snapshot {}", record.from_snapshot);
    layers.push_back("oci:" + own);
  }
  return MountAt(options, directory,
                 {.image = record.image,
                  .layer_images = std::move(layers),
                  .writable = true,
                  .writable_dir = disk,
                  .is_volatile = true,  // a sandbox does not survive that either
                  .registry = registry});
}

namespace {

// Whether something is mounted there. The list of all mounts is read only if the kernel does not say.
absl::StatusOr<bool> IsMounted(const std::string& path) {
  struct statx info {};
  const int flags = AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC;
  const bool is_there = ::statx(AT_FDCWD, path.c_str(), flags, 0, &info) == 0;
  if (!is_there && errno == ENOENT) return false;
  if (is_there && (info.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0) {  // Linux 5.8
    return (info.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
  }
  ASSIGN_OR_RETURN(const auto mounted, fs::FindMount(path));
  return mounted.has_value();
}

}  // namespace

absl::Status RemoveSandbox(const LauncherOptions& options, const std::string& directory) {
  const std::string id = directory.substr(directory.rfind('/') + 1);
  ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Of("lamina/" + id));
  RETURN_IF_ERROR(group.KillAll());
  // The engine unmounts meanwhile.
  std::future<absl::Status> group_removed =
      std::async(std::launch::async, [&group] { return group.Remove(); });
  const std::string rootfs = directory + "/rootfs";
  ASSIGN_OR_RETURN(const bool is_mounted, IsMounted(rootfs));
  if (is_mounted) {
    absl::Status unmounted = EngineClient(options).Unmount(rootfs);
    // Of an engine that is gone.
    if (!unmounted.ok() && ::umount2(rootfs.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) != 0 &&
        errno != EINVAL && errno != ENOENT) {
      return unmounted;
    }
  }
  RETURN_IF_ERROR(group_removed.get());
  const std::string disk = directory + "/disk";
  ASSIGN_OR_RETURN(const bool has_disk, IsMounted(disk));
  if (has_disk && ::umount2(disk.c_str(), UMOUNT_NOFOLLOW) != 0 &&
      ::umount2(disk.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) != 0) {
    return ErrnoStatus(errno, "unmount " + disk);
  }
  // A mount on rootfs keeps it, so that nothing is ever removed through one.
  if (::rmdir(rootfs.c_str()) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, "remove " + rootfs);
  }
  return RemoveTree(directory);
}

}  // namespace lamina::backends
