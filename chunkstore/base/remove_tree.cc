// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/remove_tree.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <vector>

#include "chunkstore/base/directory_names.h"
#include "chunkstore/base/file.h"

namespace lamina {
namespace {

// Directories that are found in others are moved up to the top one: so none is ever far down, and one
// after the other can be emptied there.
class Remover {
 public:
  explicit Remover(int top) : top_(top) {}

  // Removes all that is in the top directory.
  absl::Status Empty() {
    while (true) {
      ASSIGN_OR_RETURN(const std::vector<std::string> names, DirectoryNames(top_));
      if (names.empty()) return absl::OkStatus();
      for (const std::string& name : names) {
        ASSIGN_OR_RETURN(const bool removed, Remove(top_, name));
        if (removed) continue;
        RETURN_IF_ERROR(EmptyChild(name));
        if (::unlinkat(top_, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) {
          return ErrnoStatus(errno, "remove directory " + name);
        }
      }
    }
  }

 private:
  // False for a directory that is not empty.
  static absl::StatusOr<bool> Remove(int directory, const std::string& name) {
    if (::unlinkat(directory, name.c_str(), 0) == 0 || errno == ENOENT) return true;
    // What unlink(2) says of directories; POSIX has EPERM, which others mean otherwise.
    if (errno != EISDIR && errno != EPERM) return ErrnoStatus(errno, "remove " + name);
    const int error = errno;
    if (::unlinkat(directory, name.c_str(), AT_REMOVEDIR) == 0 || errno == ENOENT) return true;
    if (errno == ENOTEMPTY || errno == EEXIST) return false;
    return ErrnoStatus(errno == ENOTDIR ? error : errno, "remove " + name);
  }

  absl::Status EmptyChild(const std::string& child) {
    open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW,
                    .resolve = RESOLVE_BENEATH | RESOLVE_NO_XDEV};
    const UniqueFd directory(
        static_cast<int>(::syscall(SYS_openat2, top_, child.c_str(), &how, sizeof(how))));
    if (!directory.valid()) return ErrnoStatus(errno, "open directory " + child);
    ASSIGN_OR_RETURN(const std::vector<std::string> names, DirectoryNames(directory.get()));
    for (const std::string& name : names) {
      ASSIGN_OR_RETURN(const bool removed, Remove(directory.get(), name));
      if (!removed) RETURN_IF_ERROR(MoveUp(directory.get(), name));
    }
    return absl::OkStatus();
  }

  absl::Status MoveUp(int directory, const std::string& name) {
    while (true) {
      const std::string new_name = fmt::format(".removed-{}", moved_++);
      if (::renameat(directory, name.c_str(), top_, new_name.c_str()) == 0) {
        return absl::OkStatus();
      }
      // Somebody chose the same name.
      if (errno == EEXIST || errno == ENOTEMPTY || errno == ENOTDIR) continue;
      return ErrnoStatus(errno, "move directory " + name);
    }
  }

  const int top_;
  uint64_t moved_ = 0;
};

}  // namespace

absl::Status RemoveTree(const std::string& directory) {
  const absl::StatusOr<UniqueFd> top = OpenFile(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (absl::IsNotFound(top.status())) return absl::OkStatus();
  RETURN_IF_ERROR(top.status());
  RETURN_IF_ERROR(Remover(top->get()).Empty(), "remove {}", directory);
  if (::rmdir(directory.c_str()) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, "remove " + directory);
  }
  return absl::OkStatus();
}

}  // namespace lamina
