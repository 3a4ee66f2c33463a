// SPDX-License-Identifier: Apache-2.0
//
// What this folder's FUSE file systems have in common: their mounts can outlive the process.
#ifndef LAMINA_FS_MOUNT_FUSE_FS_H_
#define LAMINA_FS_MOUNT_FUSE_FS_H_

#include <string>

#include "chunkstore/base/file.h"

namespace lamina::fs {

// What the next process needs to serve a mount.
struct FuseHandover {
  UniqueFd device;         // the connection's descriptor or a duplicate of it
  std::string state;       // as FuseFs::state() gave it
  bool can_resend = true;  // false: as if the kernel were older than 6.9, for tests
};

// True if the connection is gone: unmounted and no longer used, or aborted.
bool HasEnded(const UniqueFd& device);

// Thread-safe.
class FuseFs {
 public:
  virtual ~FuseFs() = default;

  // The connection's descriptor, to be duplicated; valid as long as the object.
  virtual int device() const = 0;
  // True if it is another one than the one that was taken over. All duplicates of that must be closed
  // for its last readers, which get errors. Only kernels before 6.9 need this.
  virtual bool has_new_device() const = 0;
  // What was agreed on with the kernel: printable text, the same for the life of the mount.
  virtual std::string state() const = 0;
  // Lets the mount stay when the object goes: requests wait in the kernel for the next process, as
  // long as someone has the descriptor.
  virtual void LeaveMounted() = 0;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_FUSE_FS_H_
