// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/latency_window.h"

#include <algorithm>

namespace lamina::registry {

void LatencyWindow::Add(Duration latency) {
  const std::lock_guard lock(mutex_);
  samples_[added_++ % kSamples] = latency;
  saved_ = std::min(saved_ + kHedgesPerRequest, kMaxSaved);
}

LatencyWindow::Duration LatencyWindow::Patience() const {
  const std::lock_guard lock(mutex_);
  const size_t count = std::min(added_, kSamples);
  if (count < kEnough) return kWithoutSamples;
  std::array<Duration, kSamples> sorted = samples_;
  const auto p95 = sorted.begin() + static_cast<ptrdiff_t>(count * 95 / 100);
  std::nth_element(sorted.begin(), p95, sorted.begin() + static_cast<ptrdiff_t>(count));
  return std::max<Duration>(*p95, kFloor);
}

bool LatencyWindow::TakeHedge() {
  const std::lock_guard lock(mutex_);
  if (saved_ < 1) return false;
  saved_ -= 1;
  return true;
}

}  // namespace lamina::registry
