// SPDX-License-Identifier: Apache-2.0
//
// Lists a directory tree, so that both sides of a comparison do the same work in the same order.
#ifndef LAMINA_BENCH_TREE_WALK_H_
#define LAMINA_BENCH_TREE_WALK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::bench {

struct TreeFile {
  std::string path;
  uint64_t size = 0;
};

// Everything below a root, in the order of names; symbolic links are not followed. A file with
// several names is listed once in `files`.
struct TreeList {
  std::vector<std::string> paths;  // all of it, the root too
  std::vector<std::string> directories;
  std::vector<TreeFile> files;  // regular ones
};

absl::StatusOr<TreeList> WalkTree(const std::string& root);

}  // namespace lamina::bench

#endif  // LAMINA_BENCH_TREE_WALK_H_
