// SPDX-License-Identifier: Apache-2.0
#include "erofs/merge.h"

#include <limits>

#include "erofs/layer_loader.h"
#include "erofs/tree_memory.h"

namespace lamina::erofs {
namespace {

// By estimate, as when it was filled.
uint64_t MemoryOf(const Tree& tree) {
  uint64_t bytes = 0;
  for (InodeIndex i = 0; i < tree.inode_limit(); ++i) {
    const Inode& inode = tree.inode(i);
    bytes += XattrMemory(inode);
    if (!inode.is_directory()) continue;
    for (const DirectoryEntry& entry : tree.Entries(i)) {
      bytes += EntryMemory(tree.inode(entry.inode), entry.name);
    }
  }
  return bytes;
}

}  // namespace

absl::StatusOr<Tree> MergeLayers(std::span<const Reader* const> layers) {
  if (layers.size() > std::numeric_limits<uint16_t>::max()) {
    return absl::InvalidArgumentError(fmt::format("merge {} layers: at most {}", layers.size(),
                                                  std::numeric_limits<uint16_t>::max()));
  }
  Tree tree;
  uint64_t memory = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    RETURN_IF_ERROR(OverlayImage(*layers[i], static_cast<uint16_t>(i + 1), tree, memory),
                    "merge layer {}", i);
    // Removed names are dropped when they are as many as those there are, which costs less than it
    // did to add them; or sooner if they would count against the limit.
    const size_t removed = tree.removed_name_count();
    if (removed == 0 || (removed < tree.name_count() && memory < kMaxTreeMemory / 2)) continue;
    tree.Compact();
    memory = MemoryOf(tree);
  }
  return tree;
}

absl::StatusOr<LayerTree> ReadLayer(const Reader& layer) {
  LayerTree result;
  RETURN_IF_ERROR(LoadLayer(layer, result.tree, result.marks), "read layer");
  return result;
}

}  // namespace lamina::erofs
