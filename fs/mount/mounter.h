// SPDX-License-Identifier: Apache-2.0
//
// Mounts and unmounts in a process of its own.
//
// A mount call looks at files that this process serves over FUSE itself: EROFS opens its devices,
// overlayfs reads attributes of its layers. A thread that waits for such an answer cannot be killed
// (Linux, fs/fuse/dev.c, request_wait_answer), and a process with such a thread cannot end, so its
// descriptors and locks stay: nobody could ever follow it. The process here may wait like that
// without harm: it has nothing that anyone else needs.
#ifndef LAMINA_FS_MOUNT_MOUNTER_H_
#define LAMINA_FS_MOUNT_MOUNTER_H_

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"
#include "fs/mount/mount.h"

namespace lamina::fs {

// Thread-safe; calls are done one after the other, by processes that had `lock` before as well.
class Mounter {
 public:
  // Forks; best before other threads are started. The process ends with this one. It does nothing
  // before it has locked the file `lock` (made if missing): what an earlier one is still doing, or
  // has waited to do, is over then. If it dies, the call that notices fails, and another process does
  // those that follow.
  static absl::StatusOr<std::unique_ptr<Mounter>> Start(const std::string& lock);
  // Waits for the process to end.
  ~Mounter();

  // MountErofs, ShareErofs and Unmount of mount.h.
  absl::Status MountErofs(const std::string& metadata, const std::vector<std::string>& devices,
                          const std::string& target, bool loop);
  absl::Status ShareErofs(const std::string& source, const std::string& target);
  absl::Status Unmount(const std::string& target, bool detach = false);
  // MountOverlay of mount.h. Makes the upper directory if it is not there from an earlier mount, with
  // the attributes of the uppermost lower one: overlayfs shows those of the upper one for the root of
  // the merged tree.
  absl::Status MountOverlay(const OverlayDirectories& directories, const std::string& target);

  // The process that did the last call, 0 if it has died.
  pid_t process() const { return process_; }

 private:
  explicit Mounter(std::string lock) : lock_(std::move(lock)) {}
  absl::Status Call(const std::vector<std::string>& fields);
  // Both: with mutex_ held, or before it is needed.
  absl::Status StartProcess();
  void EndProcess();

  const std::string lock_;
  std::mutex mutex_;
  UniqueFd socket_;  // none while there is no process
  pid_t process_ = 0;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_MOUNTER_H_
