// SPDX-License-Identifier: Apache-2.0
#include "backends/sandbox_directory.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "backends/cgroup.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/program.h"
#include "fs/engine/client.h"
#include "fs/mount/mount.h"

namespace lamina::backends {
namespace {

absl::Status MakeDirectory(const std::string& path, mode_t mode) {
  if (::mkdir(path.c_str(), mode) != 0) return ErrnoStatus(errno, "make directory " + path);
  return absl::OkStatus();
}

// A loop device that goes when its last user does, writable.
absl::StatusOr<std::pair<std::string, UniqueFd>> AttachLoop(const std::string& file) {
  ASSIGN_OR_RETURN(const UniqueFd backing, OpenFile(file, O_RDWR));
  ASSIGN_OR_RETURN(const UniqueFd control, OpenFile("/dev/loop-control", O_RDWR));
  constexpr int kAttempts = 64;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
    if (number < 0) return ErrnoStatus(errno, "find a free loop device");
    const std::string path = fmt::format("/dev/loop{}", number);
    ASSIGN_OR_RETURN(UniqueFd device, OpenFile(path, O_RDWR));
    loop_config config{.fd = static_cast<uint32_t>(backing.get()),
                       .info = {.lo_flags = LO_FLAGS_AUTOCLEAR}};
    if (::ioctl(device.get(), LOOP_CONFIGURE, &config) == 0) {
      return std::pair(path, std::move(device));
    }
    if (errno != EBUSY) return ErrnoStatus(errno, "configure " + path);
  }
  return absl::UnavailableError("others keep taking the free loop devices");
}

absl::Status MountDisk(const std::string& directory, uint64_t bytes) {
  constexpr uint64_t kLeast = 4 << 20;
  if (bytes < kLeast) {
    return absl::InvalidArgumentError(fmt::format("a disk has {} bytes at least", kLeast));
  }
  const std::string image = directory + "/disk.img";
  {
    ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(image, O_RDWR | O_CREAT | O_EXCL, 0600));
    if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
      return ErrnoStatus(errno, "make " + image);
    }
  }
  // No journal and no reserve: it lives no longer than its sandbox.
  RETURN_IF_ERROR(RunProgram({"mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", "-E",
                              "lazy_itable_init=1,nodiscard,root_owner=0:0", image}));
  ASSIGN_OR_RETURN(const auto loop, AttachLoop(image));
  const std::string disk = directory + "/disk";
  if (::mount(loop.first.c_str(), disk.c_str(), "ext4", MS_NOATIME | MS_NOSUID | MS_NODEV,
              nullptr) != 0) {
    return ErrnoStatus(errno, fmt::format("mount {} on {}", loop.first, disk));
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

absl::Status MountRootfs(const LauncherOptions& options, const std::string& directory,
                         const Record& record, const registry::Settings& registry) {
  const std::string disk = directory + "/disk";
  RETURN_IF_ERROR(MakeDirectory(disk, 0700));
  if (record.limits.disk_bytes > 0) {
    RETURN_IF_ERROR(MountDisk(directory, record.limits.disk_bytes), "disk of {} bytes",
                    record.limits.disk_bytes);
  }
  std::vector<std::string> layers = record.layers;
  if (!record.from_snapshot.empty()) {
    const std::string from = SnapshotsDirectory(options) + "/" + record.from_snapshot;
    const std::string own = directory + "/snapshot";
    RETURN_IF_ERROR(LinkSnapshot(from + "/image", own), "snapshot {}", record.from_snapshot);
    layers.push_back("oci:" + own);
  }
  const std::string rootfs = directory + "/rootfs";
  RETURN_IF_ERROR(MakeDirectory(rootfs, 0755));
  return EngineClient(options)
      .Mount({.image = record.image,
              .layer_images = std::move(layers),
              .target = rootfs,
              .writable = true,
              .writable_dir = disk,
              .registry = registry})
      .status();
}

absl::Status RemoveSandbox(const LauncherOptions& options, const std::string& directory) {
  const std::string id = directory.substr(directory.rfind('/') + 1);
  ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Of("lamina/" + id));
  RETURN_IF_ERROR(group.Remove());
  const std::string rootfs = directory + "/rootfs";
  ASSIGN_OR_RETURN(const auto mounted, fs::FindMount(rootfs));
  if (mounted.has_value()) {
    const absl::Status unmounted = EngineClient(options).Unmount(rootfs);
    // Of an engine that is gone.
    if (!unmounted.ok() && ::umount2(rootfs.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) != 0 &&
        errno != EINVAL && errno != ENOENT) {
      return unmounted;
    }
  }
  const std::string disk = directory + "/disk";
  ASSIGN_OR_RETURN(const auto disk_mounted, fs::FindMount(disk));
  if (disk_mounted.has_value() && ::umount2(disk.c_str(), UMOUNT_NOFOLLOW) != 0 &&
      ::umount2(disk.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) != 0) {
    return ErrnoStatus(errno, "unmount " + disk);
  }
  // A mount on rootfs keeps it, so that nothing is ever removed through one.
  if (::rmdir(rootfs.c_str()) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, "remove " + rootfs);
  }
  std::error_code error;
  std::filesystem::remove_all(directory, error);
  if (error) return absl::InternalError(fmt::format("remove {}: {}", directory, error.message()));
  return absl::OkStatus();
}

uint64_t DiskUsage(const std::string& directory) {
  constexpr uint64_t kBlock = 512;
  uint64_t bytes = 0;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator entry(directory, error), end;
       !error && entry != end; entry.increment(error)) {
    struct stat info {};
    if (::lstat(entry->path().c_str(), &info) == 0) {
      bytes += static_cast<uint64_t>(info.st_blocks) * kBlock;
    }
  }
  return bytes;
}

}  // namespace lamina::backends
