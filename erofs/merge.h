// SPDX-License-Identifier: Apache-2.0
//
// Merges the metadata of an image's layers into the tree that overlayfs would show of them:
// whiteouts and opaque directories are applied and gone, upper files replace lower ones,
// directories are joined with the attributes of the uppermost.
#ifndef LAMINA_EROFS_MERGE_H_
#define LAMINA_EROFS_MERGE_H_

#include <span>
#include <string_view>

#include "erofs/reader.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// Marks a directory of a layer that exists only because something is in it: the archive had no
// entry for the directory itself, so it says nothing of its mode, owner, times or xattrs. A merge
// takes those of the directory below.
inline constexpr std::string_view kImpliedXattr = "trusted.lamina.implied";

// `layers` go from the lowest to the uppermost. Each refers to its content as device slot 1; in the
// result layer i's content is slot i + 1, so the caller's device table is one device a layer. Hard
// links survive inside a layer; they never span layers (as in overlayfs, which copies up one name).
//
// Memory goes with what the result and one layer hold, however many layers replace the same files.
// If that is more than 1 GiB of names, inodes and attributes by estimate (tree_memory.h; some five
// million files), it is kResourceExhausted.
absl::StatusOr<Tree> MergeLayers(std::span<const Reader* const> layers);

// What of a layer overlayfs would not show as MergeLayers does.
struct LayerMarks {
  // The archive said nothing of the root directory's attributes; overlayfs takes those of the
  // uppermost layer.
  bool implied_root = false;
  // Nor of some other directory's.
  bool implied_directories = false;
  // It hides all of the layers below; overlayfs asks that of directories in a layer, not of the layer's
  // root (Linux, fs/overlayfs/super.c, ovl_get_root).
  bool opaque_root = false;
};

// A layer by itself, for the kernel's overlayfs to stack on others: whiteouts and opaque directories
// stay, each in the form that every kernel knows (a character device 0:0, trusted.overlay.opaque), and
// what else an image has of overlayfs' xattrs is gone. Memory is limited as above.
struct LayerTree {
  Tree tree;
  LayerMarks marks;
};
absl::StatusOr<LayerTree> ReadLayer(const Reader& layer);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_MERGE_H_
