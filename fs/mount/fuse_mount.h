// SPDX-License-Identifier: Apache-2.0
//
// Makes FUSE mounts: directly as root, through fusermount3(1) as another user. libfuse could do it,
// but tells why it failed on standard error only.
#ifndef LAMINA_FS_MOUNT_FUSE_MOUNT_H_
#define LAMINA_FS_MOUNT_FUSE_MOUNT_H_

#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

struct FuseMountOptions {
  std::string mountpoint;         // an existing directory
  std::string source;             // what /proc/mounts shows as the device
  std::string subtype;            // the type there is "fuse.SUBTYPE"
  bool allow_other = false;       // other users may enter; the mode bits decide what they may do
  bool privileged_files = false;  // set-user-ID bits and device nodes work; root only
};

// Mounts read-only, with the kernel checking permissions, and returns the /dev/fuse descriptor of
// the connection. The kernel's first request waits there.
absl::StatusOr<UniqueFd> MountFuse(const FuseMountOptions& options);

// True if this user may use allow_other: root, or anyone if /etc/fuse.conf has user_allow_other.
bool MayAllowOther();

// fusermount3 -u, for a user's own mounts; `lazy` is its -z.
absl::Status UnmountFuseAsUser(const std::string& target, bool lazy);

// OK, or why fusermount3 cannot be used.
absl::Status CheckFusermount();

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_FUSE_MOUNT_H_
