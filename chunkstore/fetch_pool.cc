// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/fetch_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace lamina::chunkstore {
namespace {

constexpr std::chrono::seconds kIdleTime(1);
// How long a task waits for an origin before others are helped to threads, and how often it is looked
// whether they need one.
constexpr std::chrono::seconds kPatience(1);
constexpr std::chrono::milliseconds kWatchInterval(100);
// Each has buffers as well.
constexpr size_t kMaxSpares = 64;

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
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(/*is_spare=*/false); });
  watcher_ = std::thread([this] { Watch(); });
}

FetchPool::~FetchPool() { Stop(); }

void FetchPool::Add(std::shared_ptr<Task> task) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      Queue& queued = queue(task->priority_);
      queued.push_back(std::move(task));
      Wake();
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
  Wake();
}

void FetchPool::Wake() {
  // All, as a spare one may not be able to run what is there.
  spares_.empty() ? wake_.notify_one() : wake_.notify_all();
  if (HasUnserved()) watch_.notify_one();
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
    watch_.notify_all();
  }
  watcher_.join();  // from here on there are no further threads
  for (std::thread& thread : threads_) thread.join();
  for (std::thread& thread : spares_) thread.join();
  for (const std::shared_ptr<Task>& task : left) task->Abandon(Stopped());
}

bool FetchPool::HasRoom(Priority priority, size_t spares) const {
  if (priority == Priority::kForeground) return true;
  const size_t bulk = running(Priority::kBulk) + running(Priority::kIdle);
  if (running(Priority::kPrefetch) + bulk >= max_not_foreground_ + spares) return false;
  if (priority == Priority::kPrefetch) return true;
  if (priority == Priority::kIdle && running(Priority::kForeground) > 0) return false;
  return bulk < max_bulk_ + spares;
}

std::list<FetchPool::Wait>::const_iterator FetchPool::EndOfLongWaits() const {
  const Clock::time_point long_ago = Clock::now() - kPatience;
  return std::ranges::find_if(waits_, [&](const Wait& wait) { return wait.since > long_ago; });
}

bool FetchPool::MayAnswer(size_t origin) const {
  return std::none_of(waits_.cbegin(), EndOfLongWaits(),
                      [&](const Wait& wait) { return wait.origin == origin; });
}

std::optional<FetchPool::Found> FetchPool::Next(bool is_spare) {
  for (size_t i = 0; i < kPriorities; ++i) {
    const auto priority = static_cast<Priority>(i);
    Queue& tasks = queues_[i];
    // Those that wait long have the places of others, who get as many more.
    if (tasks.empty() || !HasRoom(priority, spares_.size())) continue;
    const auto found =
        std::ranges::find_if(tasks, [this](const auto& task) { return MayAnswer(task->origin_); });
    if (found != tasks.end()) return Found{priority, found};
    if (!is_spare && HasRoom(priority, 0)) return Found{priority, tasks.begin()};
  }
  return std::nullopt;
}

bool FetchPool::HasUnserved() {
  const bool has_tasks = !std::ranges::all_of(queues_, &Queue::empty);
  return has_tasks && (idle_ == 0 || !Next(/*is_spare=*/false).has_value());
}

bool FetchPool::NeedsSpare() {
  const auto waiting = std::distance(waits_.cbegin(), EndOfLongWaits());
  if (spares_.size() >= std::min(static_cast<size_t>(waiting), kMaxSpares)) return false;
  return HasUnserved() && std::ranges::any_of(queues_, [this](const Queue& tasks) {
           return std::ranges::any_of(
               tasks, [this](const auto& task) { return MayAnswer(task->origin_); });
         });
}

void FetchPool::Work(bool is_spare) {
  Scratch scratch;
  std::unique_lock lock(mutex_);
  while (true) {
    std::optional<Found> found;
    const auto may_run = [&] {
      found = Next(is_spare);
      return stopped_ || found.has_value();
    };
    ++idle_;
    if (!wake_.wait_for(lock, kIdleTime, may_run) && !is_spare) {
      lock.unlock();
      scratch.Release();
      lock.lock();
      wake_.wait(lock, may_run);
    }
    --idle_;
    if (stopped_) return;
    if (!found.has_value()) break;
    std::shared_ptr<Task> task = std::move(*found->task);
    queue(found->priority).erase(found->task);
    ++running_[static_cast<size_t>(found->priority)];
    if (HasUnserved()) watch_.notify_one();
    lock.unlock();
    task->Run(scratch);
    task.reset();  // may free a blob, so not under the lock
    lock.lock();
    --running_[static_cast<size_t>(found->priority)];
    // This thread may go on with a foreground task, so another one gets the place that came free.
    if (Next(/*is_spare=*/false).has_value()) Wake();
  }
  ended_.push_back(std::this_thread::get_id());
  watch_.notify_one();
}

void FetchPool::Watch() {
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    watch_.wait(lock, [this] { return stopped_ || HasUnserved() || !ended_.empty(); });
    watch_.wait_for(lock, kWatchInterval, [this] { return stopped_; });
    JoinEndedSpares();
    if (stopped_ || !NeedsSpare()) continue;
    try {
      spares_.emplace_back([this] { Work(/*is_spare=*/true); });
    } catch (const std::system_error&) {
      // Too many threads: they wait for those that are there, or for the next look.
    }
  }
}

void FetchPool::JoinEndedSpares() {
  for (const std::thread::id id : std::exchange(ended_, {})) {
    const auto spare = std::ranges::find(spares_, id, &std::thread::get_id);
    // It needs the mutex no more: it says so as the last thing it does with it.
    spare->join();
    spares_.erase(spare);
  }
}

FetchPool::OriginWait::OriginWait(FetchPool& pool, size_t origin) : pool_(pool) {
  std::lock_guard lock(pool_.mutex_);
  wait_ = pool_.waits_.insert(pool_.waits_.end(), {origin, Clock::now()});
}

FetchPool::OriginWait::~OriginWait() {
  std::lock_guard lock(pool_.mutex_);
  pool_.waits_.erase(wait_);
}

void FetchPool::OriginWait::Renew() {
  std::lock_guard lock(pool_.mutex_);
  wait_->since = Clock::now();
  pool_.waits_.splice(pool_.waits_.end(), pool_.waits_, wait_);
}

}  // namespace lamina::chunkstore
