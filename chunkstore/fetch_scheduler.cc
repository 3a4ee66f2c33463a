// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/fetch_scheduler.h"

#include <algorithm>
#include <utility>

namespace lamina::chunkstore {
namespace {

// Compressed bytes of one task. Tasks that nobody waits for are small, so that they spread over the
// threads and a reader that joins one does not wait long.
constexpr uint64_t kPrefetchBatch = 256 << 10;
// Frames that a request has under way at once; it goes on as they arrive. Bounds the memory of a
// request for a whole blob.
constexpr uint32_t kMaxUnderWay = 64;

}  // namespace

// A call of Fetch. Guarded by the scheduler's mutex but for `done`, which is called once the
// request is finished.
struct FetchScheduler::Request {
  uint32_t next = 0;  // frame to look at next
  uint32_t end = 0;
  Priority priority;
  UseTime since = kAnyTime;
  uint64_t request_size = 0;
  std::shared_ptr<ReadStats> stats;
  Done done;
  uint32_t first = 0;
  uint32_t under_way = 0;
  absl::Status status;

  bool foreground() const { return priority == Priority::kForeground; }
  bool finished() const { return under_way == 0 && next == end; }
};

struct FetchScheduler::Batch {
  Priority priority;
  UseTime since;
  uint64_t max_bytes = 0;
  const std::shared_ptr<ReadStats>& stats;
  std::vector<uint32_t> frames = {};
  uint64_t bytes = 0;
};

FetchScheduler::FetchScheduler(const FrameTable& frames, const PresentMap& present, FetchPool& pool,
                               NodeCache& cache, MakeTask make_task)
    : frames_(frames),
      present_(present),
      pool_(pool),
      cache_(cache),
      make_task_(std::move(make_task)),
      ready_(frames.size()) {}

void FetchScheduler::Fetch(uint32_t first, uint32_t end, Priority priority, uint64_t request_size,
                           std::shared_ptr<ReadStats> stats, Done done) {
  if (first == end) return done(absl::OkStatus());
  const auto request = std::make_shared<Request>(Request{
      .next = first,
      .end = end,
      .priority = priority,
      .since = priority == Priority::kForeground ? kAnyTime : cache_.Tick(),
      .request_size = BoundAhead(std::min<uint64_t>(request_size, kBatchBuffer)),
      .stats = std::move(stats),
      .done = std::move(done),
      .first = first,
  });
  Tasks tasks;
  bool finished = false;
  {
    std::lock_guard lock(mutex_);
    if (request->foreground()) {
      for (uint32_t frame = first; frame < end; ++frame) ++needed_[frame];
    }
    Schedule(request, &tasks);
    if (request->foreground()) ReadAhead(*request, &tasks);
    finished = request->finished();
  }
  Start(tasks);
  if (finished) Finish(*request);
}

void FetchScheduler::Finish(Request& request) {
  request.done(request.status);
  if (!request.foreground()) return;
  std::lock_guard lock(mutex_);
  for (uint32_t frame = request.first; frame < request.end; ++frame) {
    const auto needed = needed_.find(frame);
    if (--needed->second == 0) needed_.erase(needed);
  }
}

// In a small cache little is fetched before it is asked for.
uint64_t FetchScheduler::BoundAhead(uint64_t bytes) const {
  return std::min(bytes, cache_.allowed_ahead());
}

bool FetchScheduler::Claim(uint32_t frame) {
  std::lock_guard lock(mutex_);
  return flights_.try_emplace(frame).second;
}

void FetchScheduler::Announce(uint32_t frame) {
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    Flight& flight = flights_.find(frame)->second;
    flight.announced = true;
    // Some came to wait while it was held.
    if (std::ranges::any_of(flight.waiting, &Request::foreground)) Restart(frame, &tasks);
  }
  Start(tasks);
}

bool FetchScheduler::IsAnnounced(uint32_t frame) {
  std::lock_guard lock(mutex_);
  const auto flight = flights_.find(frame);
  return flight != flights_.end() && flight->second.announced;
}

bool FetchScheduler::ClaimAnnounced(uint32_t frame) {
  std::lock_guard lock(mutex_);
  const auto flight = flights_.find(frame);
  if (flight == flights_.end() || !flight->second.announced) return false;
  flight->second.announced = false;
  return true;
}

void FetchScheduler::Withdraw(uint32_t frame) {
  if (ClaimAnnounced(frame)) Release(std::span(&frame, 1));
}

bool FetchScheduler::ClaimToEvict(uint32_t frame) {
  std::lock_guard lock(mutex_);
  if (needed_.contains(frame) || !flights_.try_emplace(frame).second) return false;
  triggers_.erase(frame);
  ready_.Clear(frame);
  return true;
}

void FetchScheduler::Release(std::span<const uint32_t> frames) {
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    for (const uint32_t frame : frames) Restart(frame, &tasks);
  }
  Start(tasks);
}

// Ends a flight, or makes a new task for it if requests wait.
void FetchScheduler::Restart(uint32_t frame, Tasks* tasks) {
  const auto flight = flights_.find(frame);
  const std::vector<std::shared_ptr<Request>>& waiting = flight->second.waiting;
  if (waiting.empty()) {
    flights_.erase(flight);
    return;
  }
  const auto foreground = std::ranges::find_if(waiting, &Request::foreground);
  const Request& request = **(foreground != waiting.end() ? foreground : waiting.begin());
  Batch batch{.priority = request.priority,
              .since = request.since,
              .max_bytes = kBatchBuffer,
              .stats = request.stats};
  AddToBatch(frame, &batch, tasks);
  FinishBatch(&batch, tasks);
}

void FetchScheduler::GiveUpPrefetch(std::span<const uint32_t> frames, const absl::Status& why) {
  std::vector<std::shared_ptr<Request>> finished;
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    for (const uint32_t frame : frames) {
      triggers_.erase(frame);
      std::erase_if(flights_[frame].waiting, [&](const std::shared_ptr<Request>& request) {
        if (request->foreground()) return false;
        Fail(*request, why);
        if (request->finished()) finished.push_back(request);
        return true;
      });
      Restart(frame, &tasks);
    }
  }
  Start(tasks);
  for (const std::shared_ptr<Request>& request : finished) Finish(*request);
}

void FetchScheduler::Complete(uint32_t frame, const absl::Status& status) {
  std::vector<std::shared_ptr<Request>> finished;
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    if (!status.ok()) {
      triggers_.erase(frame);
    } else if (!triggers_.contains(frame)) {
      ready_.Set(frame);
    }
    const auto flight = flights_.find(frame);
    if (flight == flights_.end()) return;
    const std::vector<std::shared_ptr<Request>> waiting = std::move(flight->second.waiting);
    flights_.erase(flight);
    for (const std::shared_ptr<Request>& request : waiting) {
      if (!status.ok()) {
        Fail(*request, status);
      } else if (--request->under_way <= kMaxUnderWay / 2) {
        Schedule(request, &tasks);
      }
      if (request->finished()) finished.push_back(request);
    }
  }
  Start(tasks);
  for (const std::shared_ptr<Request>& request : finished) Finish(*request);
}

// One of the frames that the request waits for is not to be had: no further ones are fetched.
void FetchScheduler::Fail(Request& request, const absl::Status& why) {
  --request.under_way;
  request.status.Update(why);
  request.next = request.end;
}

void FetchScheduler::Schedule(const std::shared_ptr<Request>& request, Tasks* tasks) {
  const bool foreground = request->foreground();
  Batch batch{
      .priority = request->priority,
      .since = request->since,
      .max_bytes = foreground ? kBatchBuffer : std::max(request->request_size, kPrefetchBatch),
      .stats = request->stats};
  while (request->next < request->end && request->under_way < kMaxUnderWay) {
    const uint32_t frame = request->next++;
    const auto flight = flights_.find(frame);
    if (triggers_.erase(frame) != 0 && flight == flights_.end()) ready_.Set(frame);
    if (ready_.Test(frame)) continue;
    ++request->under_way;
    if (flight == flights_.end()) {
      AddToBatch(frame, &batch, tasks);
      flights_[frame].waiting.push_back(request);
    } else {
      flight->second.waiting.push_back(request);
      if (foreground && flight->second.announced) {
        flight->second.announced = false;
        AddToBatch(frame, &batch, tasks);
      }
      if (foreground && flight->second.task != nullptr) pool_.Promote(*flight->second.task);
    }
  }
  Extend(request->request_size, &batch, tasks);
  FinishBatch(&batch, tasks);
}

void FetchScheduler::ReadAhead(const Request& request, Tasks* tasks) {
  const uint64_t allowed = cache_.allowed_ahead() / kFrameSize;
  Readahead::Range range =
      readahead_.Advance(request.first, request.end,
                         static_cast<uint32_t>(std::min<uint64_t>(allowed, Readahead::kMaxWindow)));
  range.end = std::min(range.end, frames_.size());
  Batch batch{.priority = Priority::kPrefetch,
              .since = cache_.now(),
              .max_bytes = std::max(request.request_size, kPrefetchBatch),
              .stats = request.stats};
  bool trigger_set = false;
  for (uint32_t frame = range.first; frame < range.end; ++frame) {
    if (ready_.Test(frame) || flights_.contains(frame)) continue;
    if (!std::exchange(trigger_set, true)) triggers_.insert(frame);
    AddToBatch(frame, &batch, tasks);
  }
  Extend(request.request_size, &batch, tasks);
  FinishBatch(&batch, tasks);
}

bool FetchScheduler::IsMissing(uint32_t frame) const {
  return !ready_.Test(frame) && !present_.Test(frame) && !flights_.contains(frame) &&
         !triggers_.contains(frame);
}

void FetchScheduler::AddToBatch(uint32_t frame, Batch* batch, Tasks* tasks) {
  const uint64_t bytes = frames_[frame].length;
  if (batch->bytes + bytes > batch->max_bytes) FinishBatch(batch, tasks);
  batch->frames.push_back(frame);
  batch->bytes += bytes;
  flights_.try_emplace(frame);
}

void FetchScheduler::Extend(uint64_t request_size, Batch* batch, Tasks* tasks) {
  if (batch->frames.empty()) return;
  uint32_t frame = batch->frames.back() + 1;
  while (batch->bytes < request_size && frame < frames_.size() && IsMissing(frame) &&
         batch->bytes + frames_[frame].length <= batch->max_bytes) {
    AddToBatch(frame++, batch, tasks);
  }
}

void FetchScheduler::FinishBatch(Batch* batch, Tasks* tasks) {
  if (batch->frames.empty()) return;
  tasks->push_back(make_task_(batch->frames, batch->priority, batch->since, batch->stats));
  for (const uint32_t frame : batch->frames) {
    Flight& flight = flights_[frame];
    flight.task = tasks->back();
    flight.announced = false;
  }
  batch->frames.clear();
  batch->bytes = 0;
}

void FetchScheduler::Start(const Tasks& tasks) {
  for (const std::shared_ptr<FetchPool::Task>& task : tasks) pool_.Add(task);
}

}  // namespace lamina::chunkstore
