// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/fetch_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace lamina::chunkstore {
namespace {

constexpr std::chrono::seconds kIdleTime(1);

absl::Status Stopped() { return absl::CancelledError("the blob store is being closed"); }

}  // namespace

absl::StatusOr<std::span<std::byte>> Scratch::Get(Mapping* buffer, size_t size) {
  if (buffer->bytes().empty()) {
    ASSIGN_OR_RETURN(*buffer, Mapping::Anonymous(size));
  }
  return buffer->bytes();
}

void Scratch::Release() {
  batch_ = Mapping();
  frame_ = Mapping();
}

FetchPool::FetchPool(int threads) {
  max_prefetching_ = static_cast<size_t>(std::max(threads - 1, 1));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

FetchPool::~FetchPool() { Stop(); }

void FetchPool::Add(std::shared_ptr<Task> task) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      Queue& queue = task->priority_ == Priority::kForeground ? foreground_ : prefetch_;
      queue.push_back(std::move(task));
      wake_.notify_one();
      return;
    }
  }
  task->Abandon(Stopped());
}

void FetchPool::Promote(Task& task) {
  std::lock_guard lock(mutex_);
  if (task.priority_ == Priority::kForeground) return;
  task.priority_ = Priority::kForeground;
  const auto queued = std::ranges::find(prefetch_, &task, &std::shared_ptr<Task>::get);
  if (queued == prefetch_.end()) return;
  foreground_.push_back(std::move(*queued));
  prefetch_.erase(queued);
  wake_.notify_one();
}

void FetchPool::Stop() {
  Queue left;
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    left = std::exchange(foreground_, {});
    std::ranges::move(std::exchange(prefetch_, {}), std::back_inserter(left));
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  for (const std::shared_ptr<Task>& task : left) task->Abandon(Stopped());
}

bool FetchPool::MayRun() const {
  return stopped_ || !foreground_.empty() ||
         (!prefetch_.empty() && prefetching_ < max_prefetching_);
}

std::shared_ptr<FetchPool::Task> FetchPool::Take() {
  Queue& queue = foreground_.empty() ? prefetch_ : foreground_;
  std::shared_ptr<Task> task = std::move(queue.front());
  queue.pop_front();
  return task;
}

void FetchPool::Work() {
  Scratch scratch;
  std::unique_lock lock(mutex_);
  while (true) {
    if (!wake_.wait_for(lock, kIdleTime, [this] { return MayRun(); })) {
      lock.unlock();
      scratch.Release();
      lock.lock();
      wake_.wait(lock, [this] { return MayRun(); });
    }
    if (stopped_) return;
    const bool prefetching = foreground_.empty();
    std::shared_ptr<Task> task = Take();
    prefetching_ += prefetching ? 1 : 0;
    lock.unlock();
    task->Run(scratch);
    task.reset();  // may free a blob, so not under the lock
    lock.lock();
    if (!prefetching) continue;
    --prefetching_;
    // This thread may go on with a foreground task, so another one gets the free place.
    if (!prefetch_.empty()) wake_.notify_one();
  }
}

}  // namespace lamina::chunkstore
