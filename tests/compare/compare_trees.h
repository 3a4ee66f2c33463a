// SPDX-License-Identifier: Apache-2.0
//
// Compares two directory trees in everything a program can see of them: names as bytes, types,
// modes, owners, sizes, mtimes to the nanosecond, device numbers, hard-link groups and link counts,
// symbolic link targets, extended attributes of all name spaces (ACLs and capabilities among them),
// content, holes, and how the directories list (d_type, rewinding, seeking).
//
// Not compared, because EROFS does not carry it: atime, ctime and birth time; st_blocks; size and
// link count of directories, which each file system defines for itself (ext4 and EROFS count
// subdirectories, overlayfs and btrfs say 1). A hole that one side has and the other stores as
// zeros is no difference: both read as zeros, and that is checked.
#ifndef LAMINA_TESTS_COMPARE_COMPARE_TREES_H_
#define LAMINA_TESTS_COMPARE_COMPARE_TREES_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::compare {

// What can be left out of a comparison. Names, types, link targets and rdev never are.
enum class Property {
  kMode,
  kOwner,
  kMtime,  // of everything but directories
  kDirectoryMtime,
  kHardLinks,
  kXattrs,
  kContent,
  kHoles,
  kReaddir,
};

// "mode", "owner", "mtime", "directory-mtime", "hard-links", "xattrs", "content", "holes",
// "readdir".
absl::StatusOr<Property> ParseProperty(std::string_view name);

struct CompareOptions {
  std::set<Property> ignored;
  size_t max_differences = 20;  // the comparison ends when it has found so many
};

struct Comparison {
  std::vector<std::string> differences;  // one line each, names escaped so that they can be printed
  uint64_t entries = 0;                  // names compared
  uint64_t bytes = 0;                    // content compared
};

// Needs CAP_SYS_ADMIN to see trusted.* attributes. The trees may be on different file systems; each
// is walked with descriptors, so that paths may be longer than PATH_MAX. An error means that a tree
// could not be read to the end, which says nothing of their equality.
absl::StatusOr<Comparison> CompareTrees(const std::string& left, const std::string& right,
                                        const CompareOptions& options);

}  // namespace lamina::compare

#endif  // LAMINA_TESTS_COMPARE_COMPARE_TREES_H_
