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
#include "backends/fncall/slot.h"

namespace lamina::fncall {

// Thread-safe.
class Pool : public agent::Runner {
 public:
  // `sockets` of slots that are ready.
  explicit Pool(std::vector<UniqueFd> sockets);

  // Waits for a slot if all are taken. A call's `cpu_ms` counts what it and its descendants used.
  absl::StatusOr<std::unique_ptr<agent::Run>> Start(const agent::ExecMessage& message,
                                                    agent::Streams streams) override;

  // For a Run: gives its slot back; one that has gone is not used again.
  void Return(int slot, bool usable);

 private:
  const std::vector<UniqueFd> sockets_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::deque<int> free_;
  size_t lost_ = 0;
};

}  // namespace lamina::fncall

#endif  // LAMINA_BACKENDS_FNCALL_POOL_H_
