// SPDX-License-Identifier: Apache-2.0
//
// A mounted FUSE file system being served: libfuse's session, its threads and their end.
//
// A connection lives as long as its descriptor is open anywhere. So a process that is killed or
// upgraded can be followed by one that serves the same mounts, if someone else keeps the
// descriptor: TakeOver.
#ifndef LAMINA_FS_MOUNT_FUSE_SESSION_H_
#define LAMINA_FS_MOUNT_FUSE_SESSION_H_

#ifndef FUSE_USE_VERSION
#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 14)
#endif
#include <fuse_lowlevel.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fs/mount/fuse_fs.h"
#include "fs/mount/fuse_mount.h"

namespace lamina::fs {

// Thread-safe.
class FuseSession {
 public:
  struct Options {
    FuseMountOptions mount;
    unsigned capabilities = 0;  // FUSE_CAP_*, asked for where the kernel has them
  };
  // Mounts and serves `operations` (except init, which is the session's) from threads of its own.
  // In an operation, Of(request).owner() is `owner`, which must be ready for requests before the
  // call and outlive the session. Returns when the kernel and the session have agreed on a
  // protocol.
  static absl::StatusOr<std::unique_ptr<FuseSession>> Start(const Options& options,
                                                            const fuse_lowlevel_ops& operations,
                                                            void* owner);
  // Serves the connection of a session that has ended with its process, or after LeaveMounted().
  // What that session had read and not answered is asked again, so `operations` must take node ids
  // and file handles that it gave out. Before Linux 6.9 the readers of these get errors (FuseFs::
  // has_new_device). kUnavailable if the connection is gone: unmounted or aborted.
  static absl::StatusOr<std::unique_ptr<FuseSession>> TakeOver(const Options& options,
                                                               FuseHandover handover,
                                                               const fuse_lowlevel_ops& operations,
                                                               void* owner);
  // Unmounts if still mounted, waits for replies that are under way, and closes the descriptor:
  // unless it is open elsewhere, files still open give errors from then on.
  ~FuseSession();

  // For TakeOver: a descriptor to duplicate, and the text that goes with it.
  int device() const;
  std::string state() const;
  bool has_new_device() const { return has_new_device_; }  // FuseFs
  // Lets the mount stay when this object goes.
  void LeaveMounted() { leave_mounted_ = true; }

  static FuseSession& Of(fuse_req_t request) {
    return *static_cast<FuseSession*>(fuse_req_userdata(request));
  }
  void* owner() const { return owner_; }
  // The mountpoint without symbolic links.
  const std::string& mountpoint() const { return mountpoint_; }
  // True once the connection is gone: unmounted by anyone and no longer used, or aborted.
  bool ended() const { return ended_; }
  bool has(unsigned capability) const { return (capabilities_ & capability) != 0; }

  // Makes the kernel forget `name` in the directory `parent`. Not to be called from an operation.
  void ForgetEntry(fuse_ino_t parent, std::string_view name);
  // True if the kernel has the inode in memory.
  bool KernelHas(fuse_ino_t inode);

  // Around a reply that comes after its operation has returned: the session lives until EndReply.
  void BeginReply();
  void EndReply();

 private:
  explicit FuseSession(const Options& options, void* owner);
  static absl::StatusOr<std::unique_ptr<FuseSession>> Create(const Options& options,
                                                             const fuse_lowlevel_ops& operations,
                                                             void* owner);
  static void Init(void* self, fuse_conn_info* connection);
  absl::Status UseDevice(UniqueFd device);
  absl::Status RestoreState(const std::string& state);
  absl::Status ResendRequests(bool can_resend);
  absl::Status StartThreads();
  void Serve(int events);
  void KeepInitRequest(const fuse_buf& request);
  void StopThreads();
  bool StillMounted() const;

  const unsigned wanted_;
  void* const owner_;
  std::string mountpoint_;
  dev_t device_ = 0;  // of the mounted file system
  fuse_session* session_ = nullptr;
  std::atomic<unsigned> capabilities_{0};
  std::atomic<bool> ended_{false};
  std::atomic<bool> leave_mounted_{false};
  std::string init_request_;  // of the kernel, as it was read
  unsigned negotiated_ = 0;   // what was answered to it: libfuse's `want`
  bool has_new_device_ = false;
  bool negotiated_before_ = false;  // by the session that had the connection before this one
  UniqueFd stop_;                   // readable (eventfd) once the threads shall end
  std::vector<UniqueFd> events_;    // epoll, one for each thread
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool initialized_ = false;
  uint64_t replies_ = 0;  // between BeginReply and EndReply
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_FUSE_SESSION_H_
