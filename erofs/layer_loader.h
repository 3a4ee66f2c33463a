// SPDX-License-Identifier: Apache-2.0
//
// Puts what an image has into a Tree: the common part of ReadTree and MergeLayers.
#ifndef LAMINA_EROFS_LAYER_LOADER_H_
#define LAMINA_EROFS_LAYER_LOADER_H_

#include <cstdint>

#include "erofs/merge.h"
#include "erofs/reader.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// Reads an image into an empty tree, as it is.
// kResourceExhausted if that is more than kMaxTreeMemory.
absl::Status LoadImage(const Reader& reader, Tree& tree);

// Puts an image on top of what the tree has, as overlayfs would show it. Its content, which must be
// on device 1, is on device `slot` in the tree. `memory` is what the tree takes, by the estimate of
// tree_memory.h with what was removed from it, and grows: kResourceExhausted above kMaxTreeMemory.
absl::Status OverlayImage(const Reader& reader, uint16_t slot, Tree& tree, uint64_t& memory);

// Reads a layer into an empty tree; see ReadLayer in merge.h.
absl::Status LoadLayer(const Reader& reader, Tree& tree, LayerMarks& marks);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_LAYER_LOADER_H_
