// SPDX-License-Identifier: Apache-2.0
//
// The kernel's file-system context: fsopen, fsconfig, fsmount and move_mount (Linux 5.2) with
// errors that carry the kernel's own words.
#ifndef LAMINA_FS_MOUNT_FS_CONTEXT_H_
#define LAMINA_FS_MOUNT_FS_CONTEXT_H_

#include <string>
#include <utility>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

// A file-system instance being configured. Used by one thread.
class FsContext {
 public:
  static absl::StatusOr<FsContext> Open(const std::string& type);

  absl::Status SetFlag(const std::string& key);
  // The kernel takes values of up to 255 bytes.
  absl::Status SetString(const std::string& key, const std::string& value);
  // Sets an option to the file or directory at `path`, however long or odd the path is.
  absl::Status SetPath(const std::string& key, const std::string& path);
  // Makes the file system and a mount of it that is attached nowhere; closing the descriptor
  // unmounts. `attributes` are MOUNT_ATTR_* of fsmount(2).
  absl::StatusOr<UniqueFd> Mount(unsigned attributes);

  // errno of the call that failed last.
  int error() const { return error_; }

 private:
  FsContext(std::string type, UniqueFd fd) : type_(std::move(type)), fd_(std::move(fd)) {}
  absl::Status Error(int error, const std::string& what);

  std::string type_;
  UniqueFd fd_;
  int error_ = 0;
  std::vector<UniqueFd> paths_;  // long paths, open for as long as the kernel may look them up
};

// Attaches a mount made by FsContext::Mount at `target`.
absl::Status AttachMount(const UniqueFd& mount, const std::string& target);

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_FS_CONTEXT_H_
