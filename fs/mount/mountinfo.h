// SPDX-License-Identifier: Apache-2.0
//
// Parts of mountinfo.cc for the rest of this folder.
#ifndef LAMINA_FS_MOUNT_MOUNTINFO_H_
#define LAMINA_FS_MOUNT_MOUNTINFO_H_

#include <optional>
#include <string>

#include "fs/mount/mount.h"

namespace lamina::fs {

// realpath(3).
absl::StatusOr<std::string> RealPath(const std::string& path);

// FindMount for a path that is already without symbolic links; touches no file system but /proc.
absl::StatusOr<std::optional<MountInfo>> FindMountAt(const std::string& canonical);

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_MOUNTINFO_H_
