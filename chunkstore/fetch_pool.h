// SPDX-License-Identifier: Apache-2.0
//
// The threads that fetch, shared by all blobs of a store.
#ifndef LAMINA_CHUNKSTORE_FETCH_POOL_H_
#define LAMINA_CHUNKSTORE_FETCH_POOL_H_

#include <array>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"
#include "chunkstore/blob_store.h"

namespace lamina::chunkstore {

// Compressed bytes that a task holds at once, at most. Also enough for a chunk of the largest size.
inline constexpr size_t kBatchBuffer = 1 << 20;

// A thread's buffers, made on first use and given back when the thread has been idle for a while.
class Scratch {
 public:
  absl::StatusOr<std::span<std::byte>> Batch() { return Get(&batch_, kBatchBuffer); }
  absl::StatusOr<std::span<std::byte>> Frame() { return Get(&frame_, kFrameSize); }
  void Release();

 private:
  static absl::StatusOr<std::span<std::byte>> Get(Mapping* buffer, size_t size);

  Mapping batch_;
  Mapping frame_;
};

// Runs tasks by their priority, those of one priority in the order they were added. One thread is
// kept for foreground tasks, as others may wait long for a slow origin; bulk and idle tasks, which
// are long, have half of the threads at the most, and idle tasks begin only while no foreground task
// runs. Thread-safe.
class FetchPool {
 public:
  class Task {
   public:
    explicit Task(Priority priority) : priority_(priority) {}
    virtual ~Task() = default;
    // Either is called, once. Run may take long; Abandon is for tasks the pool did not get to.
    virtual void Run(Scratch& scratch) = 0;
    virtual void Abandon(const absl::Status& why) = 0;

   private:
    friend class FetchPool;
    Priority priority_;  // guarded by the pool's mutex once the task may be shared
  };

  explicit FetchPool(int threads);
  ~FetchPool();

  void Add(std::shared_ptr<Task> task);
  // Makes a task a foreground task, also one that was not added yet. No effect once it runs.
  void Promote(Task& task);
  // Waits for the tasks that run and abandons the others, now and from now on. Not to be called
  // from a task.
  void Stop();
  // Tasks of kBulk and kIdle that run at the same time.
  int max_bulk() const { return static_cast<int>(max_bulk_); }

 private:
  using Queue = std::deque<std::shared_ptr<Task>>;

  static constexpr size_t kPriorities = 4;

  void Work();
  // All below: with mutex_ held.
  Queue& queue(Priority priority) { return queues_[static_cast<size_t>(priority)]; }
  size_t running(Priority priority) const { return running_[static_cast<size_t>(priority)]; }
  bool HasRoom(Priority priority) const;
  // The priority of the task to run next, if there is one.
  std::optional<Priority> Next() const;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::array<Queue, kPriorities> queues_;
  std::array<size_t, kPriorities> running_{};  // threads that run a task of that priority
  size_t max_not_foreground_ = 1;
  size_t max_bulk_ = 1;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_FETCH_POOL_H_
