// SPDX-License-Identifier: Apache-2.0
//
// Counters of what reading an image cost, and a histogram of how long it took.
#ifndef LAMINA_CHUNKSTORE_STATS_H_
#define LAMINA_CHUNKSTORE_STATS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "chunkstore/touch_recorder.h"
#include "chunkstore/waker.h"

namespace lamina::chunkstore {

// Counts durations in buckets that are at most a quarter of their value wide. Lock-free; readings
// taken while others write are approximate.
class LatencyHistogram {
 public:
  void Add(std::chrono::nanoseconds duration);
  uint64_t count() const;
  // Upper bound of the bucket that holds the `fraction` (0..1) quantile; 0 without samples.
  std::chrono::nanoseconds Quantile(double fraction) const;
  // Samples in buckets whose upper bound is at most `bound`.
  uint64_t CountUpTo(std::chrono::nanoseconds bound) const;
  // Of all samples.
  std::chrono::nanoseconds sum() const;
  void AddTo(LatencyHistogram& total) const;

 private:
  static constexpr int kBuckets = 160;  // four for each power of two up to 2^40 ns
  std::array<std::atomic<uint64_t>, kBuckets> buckets_{};
  std::atomic<int64_t> sum_{0};  // ns
};

// absl::StatusCode, which are 0 (no error) to 16.
inline constexpr size_t kStatusCodes = 17;

// What the readers of an image caused, or of one mount of it. Shared with the fetches that they started.
struct ReadStats {
  std::atomic<uint64_t> read_requests{0};  // of the kernel
  std::atomic<uint64_t> read_bytes{0};
  std::atomic<uint64_t> missed_requests{0};  // those that had to wait for a fetch
  std::atomic<uint64_t> failed_requests{0};
  // Those of them that failed because of a fetch, by code of its status.
  std::array<std::atomic<uint64_t>, kStatusCodes> errors{};
  std::atomic<uint64_t> waiting_requests{0};  // just now, for a fetch
  std::atomic<uint64_t> origin_requests{0};
  std::atomic<uint64_t> fetched_bytes{0};  // from the origin, compressed
  std::atomic<uint64_t> fetched_frames{0};
  std::atomic<uint64_t> copied_frames{0};  // from another blob of the node
  std::atomic<uint64_t> decompressed_bytes{0};
  std::atomic<uint64_t> written_bytes{0};  // to data files on the local disk
  LatencyHistogram hit_latency;            // request to reply
  LatencyHistogram miss_latency;
  TouchRecorder touches;  // of the readers, while it is asked for
  // Called after read_requests or fetched_frames has grown.
  Waker activity;

  void AddTo(ReadStats& total) const;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_STATS_H_
