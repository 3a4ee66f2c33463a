// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/stats.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace lamina::chunkstore {
namespace {

// Values below four have a bucket each; above, the two bits behind the leading one choose among the
// four buckets of a power of two.
int BucketOf(uint64_t value) {
  if (value < 4) return static_cast<int>(value);
  const int exponent = std::bit_width(value) - 1;
  return exponent * 4 + static_cast<int>((value >> (exponent - 2)) & 3);
}

uint64_t UpperBound(int bucket) {
  if (bucket < 4) return static_cast<uint64_t>(bucket);
  const int exponent = bucket / 4;
  const int quarter = bucket % 4;
  return (uint64_t{5} + static_cast<uint64_t>(quarter)) << (exponent - 2);
}

}  // namespace

void LatencyHistogram::Add(std::chrono::nanoseconds duration) {
  const uint64_t value = static_cast<uint64_t>(std::max<int64_t>(duration.count(), 0));
  const int bucket = std::min(BucketOf(value), kBuckets - 1);
  buckets_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(static_cast<int64_t>(value), std::memory_order_relaxed);
}

uint64_t LatencyHistogram::CountUpTo(std::chrono::nanoseconds bound) const {
  const auto limit = static_cast<uint64_t>(std::max<int64_t>(bound.count(), 0));
  uint64_t count = 0;
  for (int i = 0; i < kBuckets; ++i) {
    const uint64_t in_bucket = buckets_[static_cast<size_t>(i)].load(std::memory_order_relaxed);
    if (in_bucket > 0 && UpperBound(i) <= limit) count += in_bucket;
  }
  return count;
}

std::chrono::nanoseconds LatencyHistogram::sum() const {
  return std::chrono::nanoseconds(sum_.load(std::memory_order_relaxed));
}

void LatencyHistogram::AddTo(LatencyHistogram& total) const {
  for (size_t i = 0; i < buckets_.size(); ++i) {
    total.buckets_[i].fetch_add(buckets_[i].load(std::memory_order_relaxed),
                                std::memory_order_relaxed);
  }
  total.sum_.fetch_add(sum_.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

uint64_t LatencyHistogram::count() const {
  uint64_t count = 0;
  for (const auto& bucket : buckets_) count += bucket.load(std::memory_order_relaxed);
  return count;
}

std::chrono::nanoseconds LatencyHistogram::Quantile(double fraction) const {
  const uint64_t total = count();
  if (total == 0) return std::chrono::nanoseconds(0);
  // Rank of the sample looked for, from 1.
  const double rank = std::ceil(std::clamp(fraction, 0.0, 1.0) * static_cast<double>(total));
  const uint64_t wanted = std::clamp<uint64_t>(static_cast<uint64_t>(rank), 1, total);
  uint64_t seen = 0;
  int last = 0;
  for (int i = 0; i < kBuckets && seen < wanted; ++i) {
    const uint64_t in_bucket = buckets_[static_cast<size_t>(i)].load(std::memory_order_relaxed);
    if (in_bucket == 0) continue;
    seen += in_bucket;
    last = i;
  }
  return std::chrono::nanoseconds(UpperBound(last));
}

void ReadStats::AddTo(ReadStats& total) const {
  constexpr std::atomic<uint64_t> ReadStats::*kCounters[] = {
      &ReadStats::read_requests,   &ReadStats::read_bytes,         &ReadStats::missed_requests,
      &ReadStats::failed_requests, &ReadStats::waiting_requests,   &ReadStats::origin_requests,
      &ReadStats::fetched_bytes,   &ReadStats::fetched_frames,     &ReadStats::copied_frames,
      &ReadStats::written_bytes,   &ReadStats::decompressed_bytes,
  };
  for (const auto counter : kCounters) {
    (total.*counter)
        .fetch_add((this->*counter).load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  for (size_t i = 0; i < errors.size(); ++i) {
    total.errors[i].fetch_add(errors[i].load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  hit_latency.AddTo(total.hit_latency);
  miss_latency.AddTo(total.miss_latency);
}

}  // namespace lamina::chunkstore
