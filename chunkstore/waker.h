// SPDX-License-Identifier: Apache-2.0
//
// For someone who sleeps until something happens.
#ifndef LAMINA_CHUNKSTORE_WAKER_H_
#define LAMINA_CHUNKSTORE_WAKER_H_

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>

namespace lamina::chunkstore {

// Thread-safe. Costs those who call Wake() one look at a flag while nobody sleeps.
class Waker {
 public:
  // Has the next Wake() call `wake`, once, on its thread, without locks; it must be quick. In place of
  // the one before, if that was not called. What happened just before may not be noticed: look at it
  // again after the call.
  void Arm(std::function<void()> wake) {
    std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
    armed_ = true;
  }
  void Wake() {
    if (!armed_.load(std::memory_order_seq_cst)) return;
    std::function<void()> wake;
    {
      std::lock_guard lock(mutex_);
      armed_ = false;
      wake = std::exchange(wake_, nullptr);
    }
    if (wake) wake();
  }

 private:
  std::atomic<bool> armed_{false};
  std::mutex mutex_;
  std::function<void()> wake_;  // guarded by mutex_
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_WAKER_H_
