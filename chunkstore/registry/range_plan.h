// SPDX-License-Identifier: Apache-2.0
//
// Which requests to make for a list of ranges: neighbours become one, what is very long becomes
// several.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_RANGE_PLAN_H_
#define LAMINA_CHUNKSTORE_REGISTRY_RANGE_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "chunkstore/origin.h"

namespace lamina::registry {

// Bytes between two ranges that are rather read in vain than asked around: at 1 Gbit/s they take as
// long as a fifth of a millisecond, which is less than any request.
inline constexpr uint64_t kMaxGap = 24 << 10;
// One request asks for no more than this.
inline constexpr uint64_t kMaxRequest = 4 << 20;

// One request, and where its bytes go.
struct PlannedRequest {
  uint64_t offset = 0;
  uint64_t length = 0;
  std::vector<chunkstore::RangeRead> parts;  // inside of it
};

// In the order of offsets. Empty ranges are left out; ranges may overlap.
std::vector<PlannedRequest> PlanRequests(std::span<const chunkstore::RangeRead> ranges);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_RANGE_PLAN_H_
