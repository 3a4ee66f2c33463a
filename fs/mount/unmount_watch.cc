// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/unmount_watch.h"

#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace lamina::fs {

absl::StatusOr<int> UnmountWatch::Add(const std::string& path) {
  if (!inotify_.valid()) {
    inotify_ = UniqueFd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
    if (!inotify_.valid()) return ErrnoStatus(errno, "inotify_init1");
  }
  // IN_UNMOUNT comes with every watch; one cannot ask for nothing else, and a root is not deleted.
  const int watch = ::inotify_add_watch(inotify_.get(), path.c_str(), IN_DELETE_SELF | IN_ONLYDIR);
  if (watch < 0) return ErrnoStatus(errno, "watch " + path);
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
