// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>

#include "erofs/builder.h"
#include "fs/mount/fs_context.h"
#include "fs/mount/fuse_mount.h"
#include "fs/mount/mount.h"

namespace lamina::fs {
namespace {

Capability No(const absl::Status& status) { return {false, std::string(status.message())}; }

// An unnamed file where the file system has such files, else one that is gone when it is open.
absl::StatusOr<UniqueFd> TemporaryFile(const std::string& directory) {
  UniqueFd fd(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (fd.valid()) return fd;
  std::string path = directory + "/.probe-XXXXXX";
  fd.Reset(::mkostemp(path.data(), O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "create a temporary file in " + directory);
  ::unlink(path.c_str());
  return fd;
}

absl::Status TryMountFromFile(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::string image, erofs::BuildImage(erofs::Tree(), {}));
  ASSIGN_OR_RETURN(const UniqueFd file, TemporaryFile(directory));
  RETURN_IF_ERROR(WriteFull(file.get(), 0, AsBytes(image)));
  ASSIGN_OR_RETURN(FsContext context, FsContext::Open("erofs"));
  RETURN_IF_ERROR(context.SetFlag("ro"));
  RETURN_IF_ERROR(context.SetString("source", fmt::format("/proc/self/fd/{}", file.get())));
  const auto mount = context.Mount(MOUNT_ATTR_RDONLY);  // attached nowhere, gone with `mount`
  if (!mount.ok() && context.error() == ENOTBLK) {
    return absl::UnimplementedError(fmt::format(
        "the kernel does not mount EROFS from files in {} (that needs Linux 6.12 with "
        "CONFIG_EROFS_FS_BACKED_BY_FILE, and a file system other than tmpfs or overlayfs)",
        directory));
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

Capability CanMountErofsFromFile(const std::string& directory) {
  if (Capability erofs = CanMountErofs(); !erofs.available) return erofs;
  const absl::Status status = TryMountFromFile(directory);
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
