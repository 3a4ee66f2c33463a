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
  uint64_t request_size = 0;
  std::shared_ptr<ReadStats> stats;
  Done done;
  uint32_t first = 0;
  uint32_t under_way = 0;
  absl::Status status;

  bool finished() const { return under_way == 0 && next == end; }
};

struct FetchScheduler::Batch {
  Priority priority;
  uint64_t max_bytes = 0;
  const std::shared_ptr<ReadStats>& stats;
  std::vector<uint32_t> frames = {};
  uint64_t bytes = 0;
};

FetchScheduler::FetchScheduler(const FrameTable& frames, const PresentMap& present, FetchPool& pool,
                               MakeTask make_task)
    : frames_(frames),
      present_(present),
      pool_(pool),
      make_task_(std::move(make_task)),
      ready_(frames.size()) {}

void FetchScheduler::Fetch(uint32_t first, uint32_t end, Priority priority, uint64_t request_size,
                           std::shared_ptr<ReadStats> stats, Done done) {
  if (first == end) return done(absl::OkStatus());
  const auto request = std::make_shared<Request>(Request{
      .next = first,
      .end = end,
      .priority = priority,
      .request_size = std::min<uint64_t>(request_size, kBatchBuffer),
      .stats = std::move(stats),
      .done = std::move(done),
      .first = first,
  });
  Tasks tasks;
  bool finished = false;
  {
    std::lock_guard lock(mutex_);
    Schedule(request, &tasks);
    if (priority == Priority::kForeground) ReadAhead(*request, &tasks);
    finished = request->finished();
  }
  Start(tasks);
  if (finished) request->done(request->status);
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
      --request->under_way;
      if (!status.ok()) {
        request->status.Update(status);
        request->next = request->end;
      } else if (request->under_way <= kMaxUnderWay / 2) {
        Schedule(request, &tasks);
      }
      if (request->finished()) finished.push_back(request);
    }
  }
  Start(tasks);
  for (const std::shared_ptr<Request>& request : finished) request->done(request->status);
}

void FetchScheduler::Schedule(const std::shared_ptr<Request>& request, Tasks* tasks) {
  const bool foreground = request->priority == Priority::kForeground;
  Batch batch{
      .priority = request->priority,
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
      if (foreground) pool_.Promote(*flight->second.task);
    }
  }
  Extend(request->request_size, &batch, tasks);
  FinishBatch(&batch, tasks);
}

void FetchScheduler::ReadAhead(const Request& request, Tasks* tasks) {
  Readahead::Range range = readahead_.Advance(request.first, request.end);
  range.end = std::min(range.end, frames_.size());
  Batch batch{.priority = Priority::kPrefetch,
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
  tasks->push_back(make_task_(batch->frames, batch->priority, batch->stats));
  for (const uint32_t frame : batch->frames) flights_[frame].task = tasks->back();
  batch->frames.clear();
  batch->bytes = 0;
}

void FetchScheduler::Start(const Tasks& tasks) {
  for (const std::shared_ptr<FetchPool::Task>& task : tasks) pool_.Add(task);
}

}  // namespace lamina::chunkstore
