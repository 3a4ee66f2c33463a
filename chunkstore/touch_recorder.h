// SPDX-License-Identifier: Apache-2.0
//
// Notes which frames the readers of a mount touch first, and when: what a profile is made of.
#ifndef LAMINA_CHUNKSTORE_TOUCH_RECORDER_H_
#define LAMINA_CHUNKSTORE_TOUCH_RECORDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::chunkstore {

class Blob;

// Touches that are recorded, at the most: 64 GiB in full frames.
inline constexpr size_t kMaxTouches = 1 << 18;

// The first touch of a frame.
struct Touch {
  uint32_t blob = 0;  // index in the list that the recording was started with
  uint32_t frame = 0;
  uint64_t microseconds = 0;  // since the recording began
  bool operator==(const Touch&) const = default;
};

// Thread-safe. Hits and misses are noted alike; readers pay one relaxed load while it is off.
class TouchRecorder {
 public:
  TouchRecorder();
  ~TouchRecorder();

  // kFailedPrecondition if a recording runs. `blobs` are the same for every recording of one object,
  // and must live until it is stopped.
  absl::Status Start(const std::vector<std::shared_ptr<Blob>>& blobs);
  // Ends the recording: the touches in the order they happened. kFailedPrecondition if none runs.
  absl::StatusOr<std::vector<Touch>> Stop();

  bool recording() const { return active_.load(std::memory_order_relaxed) != nullptr; }
  // A reader asked for these bytes. Blobs that are not on the list are ignored.
  void Note(const Blob& blob, uint64_t offset, uint64_t length);

 private:
  struct Recording;

  std::mutex mutex_;
  // Made by the first Start and kept: a reader may be about to use it after Stop.
  std::unique_ptr<Recording> recording_;
  std::atomic<Recording*> active_{nullptr};
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_TOUCH_RECORDER_H_
