// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

#include "erofs/builder.h"
#include "fs/mount/fs_context.h"
#include "fs/mount/fuse_mount.h"
#include "fs/mount/mount.h"

namespace lamina::fs {
namespace {

Capability No(const absl::Status& status) { return {false, std::string(status.message())}; }

// An unnamed file on a file system that EROFS could mount from: not tmpfs, whose files it refuses.
absl::StatusOr<UniqueFd> TemporaryFile() {
  for (const char* directory : {"/var/tmp", "/tmp"}) {
    struct statfs info {};
    if (::statfs(directory, &info) != 0 || info.f_type == TMPFS_MAGIC) continue;
    UniqueFd fd(::open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (fd.valid()) return fd;
  }
  return absl::UnavailableError(
      "no file system to try on: neither /var/tmp nor /tmp takes a temporary file on a disk");
}

absl::Status TryMountFromFile() {
  ASSIGN_OR_RETURN(const std::string image, erofs::BuildImage(erofs::Tree(), {}));
  ASSIGN_OR_RETURN(const UniqueFd file, TemporaryFile());
  RETURN_IF_ERROR(WriteFull(file.get(), 0, AsBytes(image)));
  ASSIGN_OR_RETURN(FsContext context, FsContext::Open("erofs"));
  RETURN_IF_ERROR(context.SetFlag("ro"));
  RETURN_IF_ERROR(context.SetString("source", fmt::format("/proc/self/fd/{}", file.get())));
  const auto mount = context.Mount(MOUNT_ATTR_RDONLY);  // attached nowhere, gone with `mount`
  if (!mount.ok() && context.error() == ENOTBLK) {
    return absl::UnimplementedError(
        "the kernel mounts EROFS from block devices only (files need Linux 6.12 and "
        "CONFIG_EROFS_FS_BACKED_BY_FILE)");
  }
  return mount.status();
}

}  // namespace

Capability CanMountErofs() {
  const auto context = FsContext::Open("erofs");
  if (context.ok()) return {true, ""};
  if (absl::IsPermissionDenied(context.status())) {
    return {false, "mounting EROFS needs root (CAP_SYS_ADMIN)"};
  }
  return No(context.status());
}

Capability CanMountErofsFromFile() {
  if (Capability erofs = CanMountErofs(); !erofs.available) return erofs;
  const absl::Status status = TryMountFromFile();
  if (!status.ok()) return No(status);
  return {true, ""};
}

Capability CanUseFuse() {
  const auto device = OpenFile("/dev/fuse", O_RDWR);
  if (!device.ok()) return No(device.status());
  if (::geteuid() != 0) {
    const absl::Status status = CheckFusermount();
    if (!status.ok()) return No(status);
    return {true, ""};
  }
  const auto context = FsContext::Open("fuse");
  if (!context.ok()) return No(context.status());
  return {true, ""};
}

}  // namespace lamina::fs
