// SPDX-License-Identifier: Apache-2.0
//
// A whole image over FUSE, served by the userspace EROFS reader: for users without root and kernels
// that cannot mount EROFS from a file. Lookups and reads are cached by the kernel for good: an
// image never changes.
#ifndef LAMINA_FS_MOUNT_TREE_FS_H_
#define LAMINA_FS_MOUNT_TREE_FS_H_

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/blob_store.h"
#include "fs/mount/fuse_fs.h"

namespace lamina::fs {

class TreeFs : public FuseFs {
 public:
  struct Options {
    std::string mountpoint;
    std::string source;                   // what /proc/mounts shows as the device
    std::span<const std::byte> metadata;  // a merged image; must outlive the object
    std::vector<std::shared_ptr<chunkstore::Blob>> blobs;  // device slots 1, 2, ...
    std::shared_ptr<chunkstore::ReadStats> stats;
  };
  // Mounts (as root directly, else through fusermount3) and serves from threads of its own.
  static absl::StatusOr<std::unique_ptr<TreeFs>> Start(Options options);
  // Serves what another process has mounted there, with the same options. kUnavailable if the
  // connection is gone.
  static absl::StatusOr<std::unique_ptr<TreeFs>> TakeOver(Options options, FuseHandover handover);
  // Unmounts if still mounted (unless LeaveMounted() was called), and stops.

  // True once the file system is no longer mounted (unmounted by anyone, or its connection
  // aborted).
  virtual bool ended() const = 0;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_TREE_FS_H_
