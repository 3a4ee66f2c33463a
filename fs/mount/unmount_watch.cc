// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/unmount_watch.h"

#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace lamina::fs {

absl::StatusOr<int> UnmountWatch::Add(const std::string& path, dev_t device) {
  const std::string what = "watch " + path;
  ASSIGN_OR_RETURN(const UniqueFd root, OpenFile(path, O_PATH | O_DIRECTORY), "{}", what);
  struct stat info {};
  if (::fstat(root.get(), &info) != 0) return ErrnoStatus(errno, what);
  if (info.st_dev != device) return absl::NotFoundError(what + ": another file system is there");
  if (!inotify_.valid()) {
    inotify_ = UniqueFd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
    if (!inotify_.valid()) return ErrnoStatus(errno, "inotify_init1");
  }
  // IN_UNMOUNT comes with every watch; one cannot ask for nothing else, and a root is not deleted.
  const int watch = ::inotify_add_watch(
      inotify_.get(), fmt::format("/proc/self/fd/{}", root.get()).c_str(), IN_DELETE_SELF);
  if (watch < 0) return ErrnoStatus(errno, what);
  return watch;
}

void UnmountWatch::Forget(int watch) {
  ReadEvents();
  // Of a file system that has ended the kernel has forgotten it already.
  if (ended_.erase(watch) == 0) ::inotify_rm_watch(inotify_.get(), watch);
}

bool UnmountWatch::Ended(int watch) {
  ReadEvents();
  return ended_.contains(watch);
}

void UnmountWatch::ReadEvents() {
  alignas(inotify_event) std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t length = ::read(inotify_.get(), buffer.data(), buffer.size());
    if (length < 0 && errno == EINTR) continue;
    if (length <= 0) return;
    for (size_t at = 0; at < static_cast<size_t>(length);) {
      inotify_event event;
      std::memcpy(&event, buffer.data() + at, sizeof(event));
      at += sizeof(event) + event.len;
      if ((event.mask & IN_UNMOUNT) != 0) ended_.insert(event.wd);
    }
  }
}

}  // namespace lamina::fs
