// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/mount.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "fs/mount/fs_context.h"
#include "fs/mount/fuse_mount.h"
#include "fs/mount/loop.h"

namespace lamina::fs {
namespace {

// On-disk superblock of EROFS (kernel, fs/erofs/erofs_fs.h).
constexpr uint64_t kErofsSuperblockOffset = 1024;
constexpr uint32_t kErofsMagic = 0xE0F5E1E2;

// The kernel says what is wrong with an image in its log only. This covers what happens most.
absl::Status CheckIsErofs(const std::string& metadata) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(metadata, O_RDONLY));
  uint32_t magic = 0;
  const absl::Status read =
      ReadFull(fd.get(), kErofsSuperblockOffset, std::as_writable_bytes(std::span(&magic, 1)));
  if (!read.ok() || magic != kErofsMagic) {
    return absl::InvalidArgumentError("not an EROFS image");
  }
  return absl::OkStatus();
}

absl::Status TryMountErofs(const std::string& metadata, const std::vector<std::string>& devices,
                           const std::string& target, bool loop) {
  RETURN_IF_ERROR(CheckIsErofs(metadata));
  std::vector<LoopDevice> loops;  // until the mount uses them
  std::vector<std::string> sources{metadata};
  sources.insert(sources.end(), devices.begin(), devices.end());
  if (loop) {
    for (std::string& source : sources) {
      ASSIGN_OR_RETURN(LoopDevice device, LoopDevice::Attach(source));
      source = device.path();
      loops.push_back(std::move(device));
    }
  }
  ASSIGN_OR_RETURN(FsContext context, FsContext::Open("erofs"));
  RETURN_IF_ERROR(context.SetFlag("ro"));
  RETURN_IF_ERROR(context.SetPath("source", sources[0]));
  for (size_t slot = 1; slot < sources.size(); ++slot) {
    RETURN_IF_ERROR(context.SetPath("device", sources[slot]));
  }
  // Set-user-ID programs and device nodes work, as in a container's root file system they must.
  auto mount = context.Mount(MOUNT_ATTR_RDONLY);
  if (!mount.ok() && context.error() == ENOTBLK) {
    return Annotate(mount.status(),
                    "the kernel mounts EROFS from block devices only (files need Linux 6.12, "
                    "CONFIG_EROFS_FS_BACKED_BY_FILE and a file system other than tmpfs)");
  }
  RETURN_IF_ERROR(mount.status());
  return AttachMount(*mount, target);
}

}  // namespace

absl::Status MountErofs(const std::string& metadata, const std::vector<std::string>& devices,
                        const std::string& target, bool loop) {
  return Annotate(TryMountErofs(metadata, devices, target, loop),
                  fmt::format("mount {} at {}", metadata, target));
}

absl::Status ShareErofs(const std::string& source, const std::string& target) {
  const std::string what = fmt::format("mount {} at {} as well", source, target);
  const UniqueFd mount(::open_tree(AT_FDCWD, source.c_str(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC));
  if (!mount.valid()) return ErrnoStatus(errno, what);
  struct statfs info {};
  if (::fstatfs(mount.get(), &info) != 0) return ErrnoStatus(errno, what);
  if (static_cast<uint32_t>(info.f_type) != kErofsMagic) {
    return absl::NotFoundError(what + ": no EROFS is mounted there");
  }
  // Where mounts are shared between namespaces, as systemd has it, a copy of a mount would be too.
  struct mount_attr attributes {};
  attributes.propagation = MS_PRIVATE;
  if (::mount_setattr(mount.get(), "", AT_EMPTY_PATH, &attributes, sizeof(attributes)) != 0) {
    return ErrnoStatus(errno, what);
  }
  return Annotate(AttachMount(mount, target), what);
}

absl::Status Unmount(const std::string& target, bool detach) {
  if (::umount2(target.c_str(), detach ? MNT_DETACH : 0) == 0) return absl::OkStatus();
  const int error = errno;
  switch (error) {
    case EINVAL:
    case ENOENT:
      return absl::NotFoundError(fmt::format("unmount {}: nothing is mounted there", target));
    case EBUSY:
      return absl::FailedPreconditionError(fmt::format(
          "unmount {}: in use: end the processes that have a file or their working "
          "directory there (fuser -vm {} lists them), and unmount what is mounted below it",
          target, target));
    case EPERM:
      break;
    default:
      return ErrnoStatus(error, fmt::format("unmount {}", target));
  }
  // Without privileges only a user's own FUSE mounts can go.
  ASSIGN_OR_RETURN(const auto mount, FindMount(target));
  if (!mount) {
    return absl::NotFoundError(fmt::format("unmount {}: nothing is mounted there", target));
  }
  if (!mount->type.starts_with("fuse"))
    return ErrnoStatus(error, fmt::format("unmount {}", target));
  return Annotate(UnmountFuseAsUser(target, detach), fmt::format("unmount {}", target));
}

}  // namespace lamina::fs
