// SPDX-License-Identifier: Apache-2.0
//
// Loop devices: for kernels whose EROFS mounts block devices only, and for disks of a limited size.
#ifndef LAMINA_FS_MOUNT_LOOP_H_
#define LAMINA_FS_MOUNT_LOOP_H_

#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

// A loop device with blocks of 4096 bytes. The kernel takes it away when its last user has closed it:
// the object here is one user, a mount is another.
class LoopDevice {
 public:
  static absl::StatusOr<LoopDevice> Attach(const std::string& file, bool writable = false);

  const std::string& path() const { return path_; }  // "/dev/loop7"

 private:
  LoopDevice(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  std::string path_;
  UniqueFd fd_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_LOOP_H_
