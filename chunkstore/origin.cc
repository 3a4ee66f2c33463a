// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/origin.h"

#include <algorithm>

namespace lamina::chunkstore {

absl::Status OriginObject::Stream(uint64_t offset, uint64_t length, std::span<std::byte> buffer,
                                  const Sink& sink) {
  while (length > 0) {
    const RangeRead range{offset, buffer.first(std::min<uint64_t>(length, buffer.size()))};
    RETURN_IF_ERROR(Read(std::span(&range, 1)));
    RETURN_IF_ERROR(sink(range.into));
    offset += range.into.size();
    length -= range.into.size();
  }
  return absl::OkStatus();
}

}  // namespace lamina::chunkstore
