// SPDX-License-Identifier: Apache-2.0
//
// Mounts with the kernel's mount calls (fsopen, fsconfig, fsmount, move_mount; Linux 5.2), never
// with mount(8), which may slip a loop device in. All need CAP_SYS_ADMIN. Errors carry the kernel's
// own message for the mount attempt where there is one.
#ifndef LAMINA_FS_MOUNT_MOUNT_H_
#define LAMINA_FS_MOUNT_MOUNT_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

// EROFS from a metadata file and device files, read-only. The files are mounted as they are
// (Linux 6.12), or through loop devices (`loop`; older kernels), which go when the mount goes.
absl::Status MountErofs(const std::string& metadata, const std::vector<std::string>& devices,
                        const std::string& target, bool loop);

// Mounts what MountErofs has mounted at `source` at another place as well: one file system, whose pages
// all share, as is `source` read-only, and what is mounted below one is not seen below the other.
// kNotFound if no EROFS is mounted at `source`.
absl::Status ShareErofs(const std::string& source, const std::string& target);

// overlayfs: `upper` and `work` on `lowers`.
struct OverlayDirectories {
  std::vector<std::string> lowers;  // uppermost first
  std::string upper;
  std::string work;
  // What is written is never waited for, be it with fsync(2) or at the end (Linux 5.10): it may be lost
  // when the machine crashes. The work directory cannot be used again.
  bool is_volatile = false;
};
absl::Status MountOverlay(const OverlayDirectories& directories, const std::string& target);

// Unmounts; with `detach` also if busy: the mount disappears now and ends when its last user does.
// kNotFound if nothing is mounted there, kFailedPrecondition (naming what to do) if it is busy.
absl::Status Unmount(const std::string& target, bool detach = false);

// One line of /proc/self/mountinfo (proc(5)), paths unescaped.
struct MountInfo {
  uint64_t id = 0;   // reused by later mounts
  dev_t device = 0;  // st_dev of what is in it: no other mounted file system has the same
  std::string target;
  std::string type;
  std::string source;
  std::string super_options;
};
absl::StatusOr<std::vector<MountInfo>> ReadMountInfo();
// The uppermost mount at exactly this path, if there is one.
absl::StatusOr<std::optional<MountInfo>> FindMount(const std::string& target);
// The same in what was read before, for many targets: reading it takes as long as there are mounts.
std::optional<MountInfo> FindMountIn(std::span<const MountInfo> mounts, const std::string& target);

// The file behind "/dev/loopN"; nothing if `source` is no loop device in use.
std::optional<std::string> LoopBackingFile(const std::string& source);
// Which mount namespace this process is in, as text to compare.
std::string MountNamespace();

// What this process and kernel can do; `reason` says in words why not.
struct Capability {
  bool available = false;
  std::string reason;
};
// EROFS in the kernel, and the right to mount it.
Capability CanMountErofs();
// And from files in `directory`: tried on a small image, as the kernel's configuration may say no,
// and so may the file system (tmpfs, overlayfs).
Capability CanMountErofsFromFile(const std::string& directory);
// /dev/fuse, and fusermount3 if not root.
Capability CanUseFuse();

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_MOUNT_H_
