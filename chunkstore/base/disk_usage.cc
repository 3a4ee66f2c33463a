// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/disk_usage.h"

#include <fts.h>
#include <sys/stat.h>

#include <cerrno>
#include <memory>
#include <set>

namespace lamina {

absl::StatusOr<DiskUsage> DiskUsageOf(const std::string& directory) {
  constexpr int64_t kBlock = 512;  // of st_blocks (stat(2))
  std::string path = directory;
  char* const roots[] = {path.data(), nullptr};
  const std::unique_ptr<FTS, decltype(&::fts_close)> tree(
      ::fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, nullptr), &::fts_close);
  if (tree == nullptr) return ErrnoStatus(errno, "usage of " + directory);
  DiskUsage usage;
  std::set<ino_t> linked;
  while (errno = 0, true) {
    const FTSENT* entry = ::fts_read(tree.get());
    if (entry == nullptr) break;
    switch (entry->fts_info) {
      case FTS_DP:  // the second time
        continue;
      case FTS_DNR:
      case FTS_ERR:
      case FTS_NS:
        if (entry->fts_errno == ENOENT && entry->fts_level > 0) continue;
        return ErrnoStatus(entry->fts_errno, fmt::format("usage of {}", entry->fts_path));
      default:
        break;
    }
    const struct stat& info = *entry->fts_statp;
    if (!S_ISDIR(info.st_mode) && info.st_nlink > 1 && !linked.insert(info.st_ino).second) continue;
    usage.bytes += info.st_blocks * kBlock;
    ++usage.inodes;
  }
  if (errno != 0) return ErrnoStatus(errno, "usage of " + directory);
  return usage;
}

}  // namespace lamina
