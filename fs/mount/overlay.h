// SPDX-License-Identifier: Apache-2.0
//
// The two ways to tell overlayfs of its layers; MountOverlay takes the one that the kernel has. And
// what else one must know to use it.
#ifndef LAMINA_FS_MOUNT_OVERLAY_H_
#define LAMINA_FS_MOUNT_OVERLAY_H_

#include <string>
#include <vector>

#include "chunkstore/base/status.h"
#include "fs/mount/mount.h"

namespace lamina::fs {

// Layer by layer, as many as there are (Linux 6.7). kUnimplemented on older kernels.
absl::Status MountOverlayByLayer(const OverlayDirectories& directories, const std::string& target);

// With mount(2), whose options must fit in a page.
absl::Status MountOverlayByString(const OverlayDirectories& directories, const std::string& target);

// Whether this process is in a user namespace of its own, where overlayfs keeps its marks in
// user.overlay.* because it may not in trusted.overlay.*.
absl::StatusOr<bool> OverlayNeedsUserXattr();

// What every overlay mount of ours has besides directories, each as "key=value" or "key". Layers come
// from images: nothing in them may lead elsewhere (redirects, metacopy), directories of several mounts
// may be the same (index), and what is written stays a plain layer: whiteouts and opaque directories,
// nothing that only this mount understands.
absl::StatusOr<std::vector<std::string>> OverlayOptions();

// Gives a directory owner, mode and time of another one. overlayfs shows those of the upper directory
// for the root of the merged tree, so it must have those of the root below.
absl::Status CopyDirectoryAttributes(const std::string& from, const std::string& to);

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_OVERLAY_H_
