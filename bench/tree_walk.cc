// SPDX-License-Identifier: Apache-2.0
#include "bench/tree_walk.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <system_error>

namespace lamina::bench {

absl::StatusOr<TreeList> WalkTree(const std::string& root) {
  TreeList tree;
  tree.paths.push_back(root);
  std::error_code error;
  auto entry = std::filesystem::recursive_directory_iterator(root, error);
  for (; !error && entry != std::filesystem::end(entry); entry.increment(error)) {
    tree.paths.push_back(entry->path());
  }
  if (error) return ErrnoStatus(error.value(), "walk " + root);
  std::sort(tree.paths.begin(), tree.paths.end());

  std::set<uint64_t> inodes;
  for (const std::string& path : tree.paths) {
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0) return ErrnoStatus(errno, "lstat " + path);
    if (S_ISDIR(info.st_mode)) {
      tree.directories.push_back(path);
    } else if (S_ISREG(info.st_mode) && inodes.insert(info.st_ino).second) {
      tree.files.push_back({path, static_cast<uint64_t>(info.st_size)});
    }
  }
  return tree;
}

}  // namespace lamina::bench
