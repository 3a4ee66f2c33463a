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
  max_not_foreground_ = static_cast<size_t>(std::max(threads - 1, 1));
  max_bulk_ = static_cast<size_t>(std::max(threads / 2, 1));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

FetchPool::~FetchPool() { Stop(); }

void FetchPool::Add(std::shared_ptr<Task> task) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      Queue& queued = queue(task->priority_);
      queued.push_back(std::move(task));
      wake_.notify_one();
      return;
    }
  }
  task->Abandon(Stopped());
}

void FetchPool::Promote(Task& task) {
  std::lock_guard lock(mutex_);
  if (task.priority_ == Priority::kForeground) return;
  Queue& from = queue(std::exchange(task.priority_, Priority::kForeground));
  const auto queued = std::ranges::find(from, &task, &std::shared_ptr<Task>::get);
  if (queued == from.end()) return;
  queue(Priority::kForeground).push_back(std::move(*queued));
  from.erase(queued);
  wake_.notify_one();
}

void FetchPool::Stop() {
  Queue left;
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    for (Queue& queue : queues_)
      std::ranges::move(std::exchange(queue, {}), std::back_inserter(left));
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  for (const std::shared_ptr<Task>& task : left) task->Abandon(Stopped());
}

bool FetchPool::HasRoom(Priority priority) const {
  if (priority == Priority::kForeground) return true;
  const size_t bulk = running(Priority::kBulk) + running(Priority::kIdle);
  if (running(Priority::kPrefetch) + bulk >= max_not_foreground_) return false;
  if (priority == Priority::kPrefetch) return true;
  if (priority == Priority::kIdle && running(Priority::kForeground) > 0) return false;
  return bulk < max_bulk_;
}

std::optional<Priority> FetchPool::Next() const {
  for (size_t i = 0; i < kPriorities; ++i) {
    const auto priority = static_cast<Priority>(i);
    if (!queues_[i].empty() && HasRoom(priority)) return priority;
  }
  return std::nullopt;
}

void FetchPool::Work() {
  Scratch scratch;
  std::unique_lock lock(mutex_);
  while (true) {
    const auto may_run = [this] { return stopped_ || Next().has_value(); };
    if (!wake_.wait_for(lock, kIdleTime, may_run)) {
      lock.unlock();
      scratch.Release();
      lock.lock();
      wake_.wait(lock, may_run);
    }
    if (stopped_) return;
    const Priority priority = *Next();
    std::shared_ptr<Task> task = std::move(queue(priority).front());
    queue(priority).pop_front();
    ++running_[static_cast<size_t>(priority)];
    lock.unlock();
    task->Run(scratch);
    task.reset();  // may free a blob, so not under the lock
    lock.lock();
    --running_[static_cast<size_t>(priority)];
    // This thread may go on with a foreground task, so another one gets the place that came free.
    if (Next().has_value()) wake_.notify_one();
  }
}

}  // namespace lamina::chunkstore
