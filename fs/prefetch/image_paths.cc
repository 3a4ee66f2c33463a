// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/image_paths.h"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

namespace lamina::fs {
namespace {

constexpr int kMaxLinks = 40;      // MAXSYMLINKS of Linux
constexpr size_t kMaxPath = 4095;  // PATH_MAX, which counts the zero
// Of a path and the links that it leads over together: what is walked takes time.
constexpr size_t kMaxComponents = 4096;

absl::Status CheckLength(std::string_view path) {
  if (path.size() <= kMaxPath) return absl::OkStatus();
  return absl::FailedPreconditionError(fmt::format("a path has {} bytes", path.size()));
}

// Puts the components of `path` in front of what is still to be walked.
void Push(std::string_view path, std::deque<std::string>& walk) {
  std::vector<std::string> parts;
  while (!path.empty()) {
    const size_t end = std::min(path.find('/'), path.size());
    if (end > 0 && path.substr(0, end) != ".") parts.emplace_back(path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  walk.insert(walk.begin(), parts.begin(), parts.end());
}

}  // namespace

absl::StatusOr<FoundFile> FindFile(const erofs::Reader& image, std::string_view path) {
  RETURN_IF_ERROR(CheckLength(path));
  std::deque<std::string> walk;
  Push(path, walk);
  ASSIGN_OR_RETURN(const erofs::InodeInfo root, image.ReadInode(image.root()));
  std::vector<std::pair<std::string, erofs::InodeInfo>> here;  // below the root
  int links = 0;
  for (size_t walked = 0; !walk.empty(); ++walked) {
    if (walked + walk.size() > kMaxComponents) {
      return absl::FailedPreconditionError(fmt::format("{}: the path is too long", path));
    }
    const std::string name = std::move(walk.front());
    walk.pop_front();
    if (name == "..") {
      if (!here.empty()) here.pop_back();
      continue;
    }
    const erofs::InodeInfo& directory = here.empty() ? root : here.back().second;
    if (!directory.is_directory()) return absl::NotFoundError(fmt::format("no file {}", path));
    ASSIGN_OR_RETURN(const erofs::Nid nid, image.Lookup(directory, name));
    ASSIGN_OR_RETURN(const erofs::InodeInfo inode, image.ReadInode(nid));
    if (!inode.is_symlink()) {
      here.emplace_back(name, inode);
      continue;
    }
    if (++links > kMaxLinks) {
      return absl::FailedPreconditionError(fmt::format("{}: too many symbolic links", path));
    }
    ASSIGN_OR_RETURN(const std::string target, image.ReadLink(inode));
    RETURN_IF_ERROR(CheckLength(target), "{}", path);
    if (target.starts_with('/')) here.clear();
    Push(target, walk);
  }
  FoundFile found{.inode = here.empty() ? root : here.back().second};
  for (const auto& [name, inode] : here) found.path.append(1, '/').append(name);
  if (found.path.empty()) found.path.append(1, '/');
  return found;
}

}  // namespace lamina::fs
