// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/readahead.h"

#include <algorithm>

namespace lamina::chunkstore {
namespace {

constexpr uint32_t kSequential = 3;  // frames in a row that make a reader sequential
// Frames by which parallel requests of one reader may be swapped.
constexpr uint32_t kReordered = 2;

}  // namespace

bool Readahead::Continues(const Stream& stream, uint32_t first, uint32_t end) {
  if (stream.next == 0) return false;
  const uint32_t furthest = std::max(stream.next + 1, stream.ahead);
  return first <= furthest && end + kReordered >= stream.next && first >= stream.start;
}

Readahead::Range Readahead::Advance(uint32_t first, uint32_t end, uint32_t max_window) {
  auto stream =
      std::ranges::find_if(streams_, [&](const Stream& s) { return Continues(s, first, end); });
  if (stream == streams_.end()) {
    stream = std::ranges::min_element(streams_, {}, &Stream::used_at);
    *stream = {.start = first, .next = first, .trigger = first + kSequential - 1, .ahead = first};
  }
  stream->used_at = ++clock_;
  stream->next = std::max(stream->next, end);
  const uint32_t used = stream->next - stream->start;
  // The first request of a stream is no sign of more to come, however long it is.
  if (stream->next <= stream->trigger || used == end - first) return {};
  const uint32_t window = std::min(std::clamp<uint32_t>(used / 2, 1, kMaxWindow), max_window);
  if (window == 0) return {};
  const Range range{std::max(stream->ahead, stream->next), 0};
  stream->trigger = range.first;
  stream->ahead = range.first + window;
  return {range.first, stream->ahead};
}

}  // namespace lamina::chunkstore
