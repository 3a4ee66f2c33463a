// SPDX-License-Identifier: Apache-2.0
//
// One read of a blob in a registry: several requests in flight, each tried at one source after the
// other, and a second one beside it if it is late.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_PARALLEL_READ_H_
#define LAMINA_CHUNKSTORE_REGISTRY_PARALLEL_READ_H_

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "chunkstore/registry/latency_window.h"
#include "chunkstore/registry/range_plan.h"
#include "chunkstore/registry/repository.h"

namespace lamina::registry {

// Used once, by one thread.
class ParallelRead {
 public:
  ParallelRead(Repository& repository, const Digest& digest, uint64_t size,
               LatencyWindow& latencies)
      : repository_(repository),
        digest_(digest),
        size_(size),
        latencies_(latencies),
        sources_(repository.Sources()) {}
  // Requests that still run are told to stop.
  ~ParallelRead();

  absl::Status Run(std::vector<PlannedRequest> plan);

 private:
  using Clock = std::chrono::steady_clock;
  struct Piece {
    PlannedRequest request;
    Clock::time_point started_at;
    size_t next_source = 0;
    int running = 0;  // attempts
    bool hedged = false;
    bool done = false;
  };
  // One request on its way. Kept until the end, its place in attempts_ is its name.
  struct Attempt {
    size_t piece = 0;
    size_t source = 0;
    int challenges = 0;
    std::string authorization;
    std::optional<uint64_t> id;  // while it runs
  };
  struct Event {
    size_t attempt = 0;
    absl::StatusOr<http::Response> response;
  };
  // Outlives the read: attempts that lost the race may end later.
  struct Events {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Event> queue;
  };

  // A piece's next request: to the next source, or to the last one again.
  absl::Status Launch(size_t piece);
  absl::Status Launch(size_t piece, size_t source, int challenges);
  absl::Status HandleEvent(Event event);
  absl::Status HandleFailure(const Attempt& attempt, absl::Status why);
  void Complete(Piece& piece, const std::string& body);
  void CancelAttempts(size_t piece);
  absl::Status HedgeLate();
  // The next event, or nothing when it is time to look for late pieces.
  std::optional<Event> NextEvent();
  bool MayHedge(const Piece& piece) const;

  Repository& repository_;
  const Digest digest_;
  const uint64_t size_;
  LatencyWindow& latencies_;
  const std::vector<Source*> sources_;
  std::vector<Piece> pieces_;
  std::vector<Attempt> attempts_;
  LatencyWindow::Duration patience_{};
  size_t started_ = 0;
  size_t done_ = 0;
  std::shared_ptr<Events> events_ = std::make_shared<Events>();
};

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_PARALLEL_READ_H_
