// SPDX-License-Identifier: Apache-2.0
//
// Decides for one blob which frames are fetched, when and together with which others. Every frame
// has one holder at a time - a task that fetches it, or an evictor - and only the holder changes
// the frame in the data file, or its bits. Whoever wants a frame that is under way waits for it.
#ifndef LAMINA_CHUNKSTORE_FETCH_SCHEDULER_H_
#define LAMINA_CHUNKSTORE_FETCH_SCHEDULER_H_

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "chunkstore/blob_tables.h"
#include "chunkstore/fetch_pool.h"
#include "chunkstore/frame_bits.h"
#include "chunkstore/node_cache.h"
#include "chunkstore/present_map.h"
#include "chunkstore/readahead.h"

namespace lamina::chunkstore {

// Thread-safe. Its mutex is held for table look-ups only, never while something is read or called
// back.
class FetchScheduler {
 public:
  using Done = std::function<void(absl::Status)>;

  // Makes the task that fetches frames, ascending, and calls Complete() for each of them. Called
  // with the scheduler locked.
  // `since` is when the fetch was asked for if it is a prefetch, else kAnyTime: only what was not
  // used since may be evicted for it.
  using MakeTask = std::function<std::shared_ptr<FetchPool::Task>(
      const std::vector<uint32_t>& frames, Priority priority, UseTime since,
      std::shared_ptr<ReadStats> stats)>;

  // All but `make_task` must outlive the scheduler.
  FetchScheduler(const FrameTable& frames, const PresentMap& present, FetchPool& pool,
                 NodeCache& cache, MakeTask make_task);

  // True if the frame is in the data file and was verified. Takes no lock.
  bool Ready(uint32_t frame) const { return ready_.Test(frame); }

  // Blob::Fetch for the frames from `first` to before `end`. Origin requests are extended over
  // missing neighbours until they have `request_size` compressed bytes.
  void Fetch(uint32_t first, uint32_t end, Priority priority, uint64_t request_size,
             std::shared_ptr<ReadStats> stats, Done done);

  // By the holder of the frame, who lets go of it: it is in the data file and verified, or could
  // not be fetched.
  void Complete(uint32_t frame, const absl::Status& status);

  // Makes the caller the holder of a frame, unless there is one.
  bool Claim(uint32_t frame);
  // By a holder who will have the frame later, as a stream comes to it: it has no holder until
  // ClaimAnnounced(). Prefetches leave it to whoever announced it; for a foreground request, which does
  // not wait so long, it is fetched by itself.
  void Announce(uint32_t frame);
  bool IsAnnounced(uint32_t frame);
  // Makes the one who announced the frame its holder again, unless it is another's by now, or is there.
  bool ClaimAnnounced(uint32_t frame);
  // By the one who announced the frame and will not have it: it is fetched for those who wait.
  void Withdraw(uint32_t frame);
  // The same for an evictor: not if a foreground request needs the frame. It is not ready from then
  // on, but those who saw it ready may still be reading it.
  bool ClaimToEvict(uint32_t frame);
  // By the holder of the frames, who has not fetched them: they are fetched for those who wait.
  void Release(std::span<const uint32_t> frames);
  // By the holder of frames that a prefetch has no room for: its requests fail, foreground requests
  // that wait for them as well have them fetched.
  void GiveUpPrefetch(std::span<const uint32_t> frames, const absl::Status& why);

 private:
  struct Request;
  // A frame that has a holder.
  struct Flight {
    bool announced = false;                 // and not held
    std::shared_ptr<FetchPool::Task> task;  // null if the holder is not a task made for this frame
    std::vector<std::shared_ptr<Request>> waiting;
  };
  struct Batch;
  using Tasks = std::vector<std::shared_ptr<FetchPool::Task>>;

  // These need the mutex. New tasks are collected for the caller to start when it is released.
  void Schedule(const std::shared_ptr<Request>& request, Tasks* tasks);
  void ReadAhead(const Request& request, Tasks* tasks);
  bool IsMissing(uint32_t frame) const;
  void AddToBatch(uint32_t frame, Batch* batch, Tasks* tasks);
  void Extend(uint64_t request_size, Batch* batch, Tasks* tasks);
  void FinishBatch(Batch* batch, Tasks* tasks);
  void Restart(uint32_t frame, Tasks* tasks);

  void Start(const Tasks& tasks);
  static void Fail(Request& request, const absl::Status& why);
  // Calls `done`, and lets go of what the request needed.
  void Finish(Request& request);
  uint64_t BoundAhead(uint64_t bytes) const;

  const FrameTable& frames_;
  const PresentMap& present_;
  FetchPool& pool_;
  NodeCache& cache_;
  const MakeTask make_task_;
  FrameBits ready_;
  std::mutex mutex_;
  absl::flat_hash_map<uint32_t, Flight> flights_;
  // Frames of foreground requests until their `done` has returned, and for how many of them.
  absl::flat_hash_map<uint32_t, uint32_t> needed_;
  Readahead readahead_;
  // Frames whose first use is to be reported to `readahead_`. They are kept from being ready until
  // then, so that the use is noticed; if they are not under way, they are fetched and verified.
  absl::flat_hash_set<uint32_t> triggers_;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_FETCH_SCHEDULER_H_
