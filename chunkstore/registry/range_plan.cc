// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/range_plan.h"

#include <algorithm>

namespace lamina::registry {

using chunkstore::RangeRead;

std::vector<PlannedRequest> PlanRequests(std::span<const RangeRead> ranges) {
  std::vector<RangeRead> pieces;
  for (RangeRead range : ranges) {
    while (!range.into.empty()) {
      const uint64_t length = std::min<uint64_t>(range.into.size(), kMaxRequest);
      pieces.push_back({range.offset, range.into.first(length)});
      range = {range.offset + length, range.into.subspan(length)};
    }
  }
  std::ranges::stable_sort(pieces, {}, &RangeRead::offset);
  std::vector<PlannedRequest> plan;
  for (const RangeRead& piece : pieces) {
    const uint64_t end = piece.offset + piece.into.size();
    if (!plan.empty()) {
      PlannedRequest& last = plan.back();
      const uint64_t joined = std::max(end, last.offset + last.length) - last.offset;
      if (piece.offset <= last.offset + last.length + kMaxGap && joined <= kMaxRequest) {
        last.length = joined;
        last.parts.push_back(piece);
        continue;
      }
    }
    plan.push_back({piece.offset, piece.into.size(), {piece}});
  }
  return plan;
}

}  // namespace lamina::registry
