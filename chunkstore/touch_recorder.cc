// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/touch_recorder.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>

#include "chunkstore/blob_store.h"
#include "chunkstore/frame_bits.h"

namespace lamina::chunkstore {

using std::chrono::steady_clock;

struct TouchRecorder::Recording {
  struct Source {
    const Blob* blob;
    FrameBits seen;
  };
  std::deque<Source> sources;  // bits cannot be moved
  std::mutex mutex;            // guards what follows
  steady_clock::time_point start;
  std::vector<Touch> touches;
};

TouchRecorder::TouchRecorder() = default;
TouchRecorder::~TouchRecorder() = default;

absl::Status TouchRecorder::Start(const std::vector<std::shared_ptr<Blob>>& blobs) {
  std::lock_guard lock(mutex_);
  if (active_.load() != nullptr) {
    return absl::FailedPreconditionError("a profile is being recorded already");
  }
  if (recording_ == nullptr) {
    recording_ = std::make_unique<Recording>();
    for (const std::shared_ptr<Blob>& blob : blobs) {
      recording_->sources.push_back({blob.get(), FrameBits(blob->frames().size())});
    }
  }
  for (Recording::Source& source : recording_->sources) {
    for (std::atomic<uint64_t>& word : source.seen.words()) word = 0;
  }
  {
    std::lock_guard recording_lock(recording_->mutex);
    recording_->start = steady_clock::now();
    recording_->touches.clear();
  }
  active_.store(recording_.get(), std::memory_order_release);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Touch>> TouchRecorder::Stop() {
  std::lock_guard lock(mutex_);
  if (active_.exchange(nullptr) == nullptr) {
    return absl::FailedPreconditionError("no profile is being recorded");
  }
  std::lock_guard recording_lock(recording_->mutex);
  return std::exchange(recording_->touches, {});
}

void TouchRecorder::Note(const Blob& blob, uint64_t offset, uint64_t length) {
  Recording* const recording = active_.load(std::memory_order_acquire);
  if (recording == nullptr || length == 0 || offset >= blob.size()) return;
  const auto source = std::ranges::find(recording->sources, &blob, &Recording::Source::blob);
  if (source == recording->sources.end()) return;
  const uint64_t last_byte = offset + std::min(length, blob.size() - offset) - 1;
  const FrameTable& frames = blob.frames();
  const uint32_t last = frames.Find(static_cast<uint32_t>(last_byte / kBlockSize));
  for (uint32_t frame = frames.Find(static_cast<uint32_t>(offset / kBlockSize)); frame <= last;
       ++frame) {
    if (source->seen.Test(frame) || !source->seen.Set(frame)) continue;
    std::lock_guard lock(recording->mutex);
    if (recording->touches.size() >= kMaxTouches) return;
    // Taken with the lock held, so that times ascend.
    const auto now = steady_clock::now() - recording->start;
    recording->touches.push_back(
        {.blob = static_cast<uint32_t>(source - recording->sources.begin()),
         .frame = frame,
         .microseconds = static_cast<uint64_t>(
             std::chrono::duration_cast<std::chrono::microseconds>(now).count())});
  }
}

}  // namespace lamina::chunkstore
