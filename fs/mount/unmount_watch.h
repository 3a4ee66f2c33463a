// SPDX-License-Identifier: Apache-2.0
//
// Tells when a mounted file system has ended: not when it is unmounted at one place, but when its last
// user is gone, be it a container's mount namespace that has a copy of the mount or a process with an
// open file.
#ifndef LAMINA_FS_MOUNT_UNMOUNT_WATCH_H_
#define LAMINA_FS_MOUNT_UNMOUNT_WATCH_H_

#include <sys/types.h>

#include <set>
#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

// For any number of file systems. Used by one thread at a time.
class UnmountWatch {
 public:
  // Watches the file system that has its root at `path`, and st_dev `device`: kNotFound if it is not
  // there, or below another one. The number is for Ended() and Forget(). Nothing is kept mounted. The
  // kernel allows each user so many (fs.inotify.max_user_watches).
  absl::StatusOr<int> Add(const std::string& path, dev_t device);
  // From then on Add() may give the number to another one.
  void Forget(int watch);
  // Whether it had ended when this was called.
  bool Ended(int watch);

 private:
  void ReadEvents();

  UniqueFd inotify_;  // made by the first Add()
  std::set<int> ended_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_UNMOUNT_WATCH_H_
