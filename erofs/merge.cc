// SPDX-License-Identifier: Apache-2.0
#include "erofs/merge.h"

#include <limits>

#include "erofs/layer_loader.h"

namespace lamina::erofs {

absl::StatusOr<Tree> MergeLayers(std::span<const Reader* const> layers) {
  if (layers.size() > std::numeric_limits<uint16_t>::max()) {
    return absl::InvalidArgumentError(fmt::format("merge {} layers: at most {}", layers.size(),
                                                  std::numeric_limits<uint16_t>::max()));
  }
  Tree tree;
  for (size_t i = 0; i < layers.size(); ++i) {
    RETURN_IF_ERROR(OverlayImage(*layers[i], static_cast<uint16_t>(i + 1), tree), "merge layer {}",
                    i);
  }
  return tree;
}

}  // namespace lamina::erofs
