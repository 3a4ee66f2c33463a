// SPDX-License-Identifier: Apache-2.0
//
// What a tree takes in memory, by estimate, and how much of it one may take. Small archives and
// images can describe millions of files, with a megabyte of xattrs for each.
#ifndef LAMINA_EROFS_TREE_MEMORY_H_
#define LAMINA_EROFS_TREE_MEMORY_H_

#include <cstdint>
#include <string_view>

#include "chunkstore/base/status.h"
#include "erofs/tree.h"

namespace lamina::erofs {

inline constexpr uint64_t kMaxTreeMemory = uint64_t{1} << 30;
inline constexpr uint64_t kEntryMemory = 200;
inline constexpr uint64_t kXattrMemory = 64;

inline uint64_t XattrMemory(const Inode& inode) {
  uint64_t bytes = 0;
  for (const Xattr& xattr : inode.xattrs) {
    bytes += kXattrMemory + xattr.name.size() + xattr.value.size();
  }
  return bytes;
}

// Of an inode and one name, without its xattrs.
inline uint64_t EntryMemory(const Inode& inode, std::string_view name) {
  return kEntryMemory + name.size() + inode.target.size() + inode.extents.size() * sizeof(Extent);
}

// Adds to what a tree takes, `memory`: kResourceExhausted if that is more than it may.
inline absl::Status ChargeTree(uint64_t& memory, uint64_t bytes) {
  memory += bytes;
  if (memory <= kMaxTreeMemory) return absl::OkStatus();
  return absl::ResourceExhaustedError(fmt::format(
      "names, inodes and attributes take more than {} bytes of memory", kMaxTreeMemory));
}

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_TREE_MEMORY_H_
