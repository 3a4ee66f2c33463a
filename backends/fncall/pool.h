// SPDX-License-Identifier: Apache-2.0
//
// The runner of the agent's server for calls: each goes to the slot that was idle longest.
#ifndef LAMINA_BACKENDS_FNCALL_POOL_H_
#define LAMINA_BACKENDS_FNCALL_POOL_H_

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/agent/runner.h"
#include "backends/cgroup.h"
#include "backends/fncall/slot.h"

namespace lamina::fncall {

// Thread-safe.
class Pool : public agent::Runner {
 public:
  // Starts the slots, whose control groups these are.
  static absl::StatusOr<std::unique_ptr<Pool>> Start(SlotStarter starter,
                                                     std::vector<backends::Cgroup> groups);

  // Waits for a slot if all are taken. A call's `cpu_ms` counts what it and its descendants used.
  absl::StatusOr<std::unique_ptr<agent::Run>> Start(const agent::ExecMessage& message,
                                                    agent::Streams streams) override;

  // For a Run: gives its slot back, after a call with so many kills at the memory limit.
  void Return(size_t slot, uint64_t memory_kills);
  // The same for a slot that has ended, and is replaced. True if the memory limit was the reason.
  bool ReturnEnded(size_t slot);

 private:
  struct Place {
    backends::Cgroup group;
    UniqueFd socket;
    uint64_t memory_kills = 0;  // at the limit, of calls that told of them
  };

  Pool(SlotStarter starter, std::vector<backends::Cgroup> groups);
  absl::StatusOr<size_t> Take();

  std::mutex starts_;  // one at a time
  SlotStarter starter_;

  std::mutex mutex_;  // guards what follows, but for places that are taken
  std::condition_variable returned_;
  std::vector<Place> places_;
  std::deque<size_t> free_;
  size_t lost_ = 0;  // that could not be replaced
};

}  // namespace lamina::fncall

#endif  // LAMINA_BACKENDS_FNCALL_POOL_H_
