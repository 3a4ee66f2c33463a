// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/origin.h"

#include <algorithm>

#include "chunkstore/base/file.h"

namespace lamina::chunkstore {
namespace {

// What is read at a time: large enough that a request's own cost does not show, and little enough
// that who waits for the beginning does not wait long.
constexpr uint64_t kStep = 4 << 20;

}  // namespace

absl::Status OriginObject::Stream(uint64_t offset, uint64_t length, std::span<std::byte> /*buffer*/,
                                  const Sink& sink) {
  if (length == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(Mapping memory, Mapping::Anonymous(std::min(length, kStep)));
  while (length > 0) {
    const RangeRead range{offset, memory.bytes().first(std::min(length, kStep))};
    RETURN_IF_ERROR(Read(std::span(&range, 1)));
    RETURN_IF_ERROR(sink(range.into));
    offset += range.into.size();
    length -= range.into.size();
  }
  return absl::OkStatus();
}

}  // namespace lamina::chunkstore
