// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::Touch;

// Compressed bytes that count as wanted about the same time. More would make fewer requests, but
// fetch things out of order.
constexpr uint64_t kWindow = 2 * chunkstore::kBulkWindow;

// For each blob of the profile its index in `blobs`, if it is there.
std::vector<std::optional<uint32_t>> IndicesOf(const Profile& profile,
                                               const std::vector<std::shared_ptr<Blob>>& blobs) {
  std::map<Digest, uint32_t> by_digest;
  for (uint32_t i = 0; i < blobs.size(); ++i) by_digest.emplace(blobs[i]->descriptor().digest, i);
  std::vector<std::optional<uint32_t>> indices;
  for (const Profile::Blob& blob : profile.blobs) {
    const auto found = by_digest.find(blob.digest);
    indices.push_back(found == by_digest.end() ? std::nullopt : std::optional(found->second));
  }
  return indices;
}

// A span and when it is wanted, as a position in the order of touches.
struct Wanted {
  size_t position = 0;
  FrameSpan span;
};

void PlanWindow(std::span<const Touch> window, const std::vector<std::shared_ptr<Blob>>& blobs,
                uint64_t gap, std::vector<FrameSpan>* plan) {
  std::vector<Wanted> frames;
  for (size_t i = 0; i < window.size(); ++i) {
    frames.push_back({i, {window[i].blob, window[i].frame, window[i].frame + 1}});
  }
  std::ranges::sort(frames, {}, [](const Wanted& wanted) {
    return std::pair(wanted.span.blob, wanted.span.first);
  });
  std::vector<Wanted> spans;
  for (const Wanted& frame : frames) {
    if (!spans.empty() && spans.back().span.blob == frame.span.blob) {
      Wanted& last = spans.back();
      const chunkstore::FrameTable& table = blobs[frame.span.blob]->frames();
      const auto& before = table[last.span.end - 1];
      if (table[frame.span.first].offset - (before.offset + before.length) <= gap) {
        last.span.end = frame.span.end;
        last.position = std::min(last.position, frame.position);
        continue;
      }
    }
    spans.push_back(frame);
  }
  std::ranges::sort(spans, {}, &Wanted::position);
  for (const Wanted& wanted : spans) plan->push_back(wanted.span);
}

}  // namespace

std::vector<Touch> TouchesIn(const Profile& profile,
                             const std::vector<std::shared_ptr<Blob>>& blobs) {
  const std::vector<std::optional<uint32_t>> indices = IndicesOf(profile, blobs);
  std::vector<Touch> touches;
  for (Touch touch : profile.touches) {
    const std::optional<uint32_t> index = indices[touch.blob];
    if (!index || touch.frame >= blobs[*index]->frames().size()) continue;
    touch.blob = *index;
    touches.push_back(touch);
  }
  return touches;
}

std::vector<FrameSpan> PlanFor(std::span<const Touch> touches,
                               const std::vector<std::shared_ptr<Blob>>& blobs, uint64_t gap) {
  std::vector<FrameSpan> plan;
  while (!touches.empty()) {
    size_t count = 0;
    uint64_t bytes = 0;
    while (count < touches.size() && bytes < kWindow) {
      const Touch& touch = touches[count++];
      bytes += blobs[touch.blob]->frames()[touch.frame].length;
    }
    PlanWindow(touches.first(count), blobs, gap, &plan);
    touches = touches.subspan(count);
  }
  return plan;
}

absl::StatusOr<std::vector<PackContent::Frame>> LayOutPack(
    const Profile& profile, const std::vector<std::shared_ptr<Blob>>& blobs, uint64_t size) {
  const std::vector<std::optional<uint32_t>> indices = IndicesOf(profile, blobs);
  std::vector<PackContent::Frame> frames;
  uint64_t offset = 0;
  for (const Touch& touch : profile.touches) {
    const std::optional<uint32_t> index = indices[touch.blob];
    if (!index || touch.frame >= blobs[*index]->frames().size()) {
      return absl::DataLossError(fmt::format("frame {} of blob {} is not in the image", touch.frame,
                                             profile.blobs[touch.blob].digest.ToString()));
    }
    frames.push_back({*index, touch.frame, offset});
    offset += blobs[*index]->frames()[touch.frame].length;
  }
  if (offset != size) {
    return absl::DataLossError(
        fmt::format("it has {} bytes, the frames of its profile have {}", size, offset));
  }
  return frames;
}

}  // namespace lamina::fs
