// SPDX-License-Identifier: Apache-2.0
//
// When a read is late enough for a second request ("The Tail at Scale", Dean and Barroso, CACM 2013):
// later than nineteen of twenty that went before it, and not more than one in ten of all.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_LATENCY_WINDOW_H_
#define LAMINA_CHUNKSTORE_REGISTRY_LATENCY_WINDOW_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <mutex>

namespace lamina::registry {

// Thread-safe.
class LatencyWindow {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // How long a request has taken.
  void Add(Duration latency);
  // How long to wait before a second request.
  Duration Patience() const;
  // Whether there may be one now; if so, it counts as made.
  bool TakeHedge();

 private:
  static constexpr size_t kSamples = 128;
  static constexpr size_t kEnough = 20;
  static constexpr auto kFloor = std::chrono::milliseconds(50);
  static constexpr auto kWithoutSamples = std::chrono::seconds(1);
  static constexpr double kHedgesPerRequest = 0.1;
  static constexpr double kMaxSaved = 5;

  mutable std::mutex mutex_;
  std::array<Duration, kSamples> samples_{};
  size_t added_ = 0;
  double saved_ = 1;  // hedges that may be made now
};

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_LATENCY_WINDOW_H_
