// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/data_readers.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace lamina::chunkstore {
namespace {

// A section lasts as long as a read from the page cache, or from the local disk if it comes to
// that.
constexpr std::chrono::microseconds kFirstPause(5);
constexpr std::chrono::microseconds kLastPause(1000);

}  // namespace

DataReaders::Section DataReaders::Enter() {
  // Which slot does not matter for correctness; that of the processor is seldom another's.
  const int processor = ::sched_getcpu();
  Slot& slot = slots_[static_cast<size_t>(std::max(processor, 0)) % kSlots];
  std::atomic<uint64_t>& count = slot.counts[turn_.load() % 2];
  count.fetch_add(1);
  return Section(&count);
}

void DataReaders::AwaitReaders() {
  std::lock_guard lock(await_mutex_);
  // Every counter is seen at zero once after the call began: nobody who was inside then still is.
  for (int side = 0; side < 2; ++side) {
    const size_t old = turn_.fetch_add(1) % 2;
    for (Slot& slot : slots_) {
      for (auto pause = kFirstPause; slot.counts[old].load() != 0;
           pause = std::min(2 * pause, kLastPause)) {
        std::this_thread::sleep_for(pause);
      }
    }
  }
}

bool DataReaders::MayCopyFrom(const Digest& blob) const {
  std::lock_guard lock(evicting_mutex_);
  return !evicting_.contains(blob);
}

void DataReaders::BeginEviction(const Digest& blob) {
  std::lock_guard lock(evicting_mutex_);
  ++evicting_[blob];
}

void DataReaders::EndEviction(const Digest& blob) {
  std::lock_guard lock(evicting_mutex_);
  const auto evicting = evicting_.find(blob);
  if (--evicting->second == 0) evicting_.erase(evicting);
}

}  // namespace lamina::chunkstore
