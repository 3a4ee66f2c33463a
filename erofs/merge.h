// SPDX-License-Identifier: Apache-2.0
//
// Merges the metadata of an image's layers into the tree that overlayfs would show of them:
// whiteouts and opaque directories are applied and gone, upper files replace lower ones,
// directories are joined with the attributes of the uppermost.
#ifndef LAMINA_EROFS_MERGE_H_
#define LAMINA_EROFS_MERGE_H_

#include <span>

#include "erofs/reader.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// `layers` go from the lowest to the uppermost. Each refers to its content as device slot 1; in the
// result layer i's content is slot i + 1, so the caller's device table is one device a layer. Hard
// links survive inside a layer; they never span layers (as in overlayfs, which copies up one name).
absl::StatusOr<Tree> MergeLayers(std::span<const Reader* const> layers);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_MERGE_H_
