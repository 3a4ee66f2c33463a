// SPDX-License-Identifier: Apache-2.0
//
// Fetches what is expected to be read, for any number of images: what a plan says, in its order;
// then, if asked, or once the readers of an image show that they read most of it, the rest.
#ifndef LAMINA_FS_PREFETCH_PREFETCHER_H_
#define LAMINA_FS_PREFETCH_PREFETCHER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "chunkstore/blob_store.h"

namespace lamina::fs {

// Frames `first` to before `end` of the blob with that index.
struct FrameSpan {
  uint32_t blob = 0;
  uint32_t first = 0;
  uint32_t end = 0;
  bool operator==(const FrameSpan&) const = default;
};

// An object that holds frames of several blobs (a pack), and where in it each is, ascending.
struct PackContent {
  struct Frame {
    uint32_t blob = 0;
    uint32_t frame = 0;
    uint64_t offset = 0;
  };
  std::shared_ptr<chunkstore::OriginObject> object;
  std::vector<Frame> frames;
};

// Thread-safe. Requests are as large as Blob::FetchBulk makes them and few at a time, behind
// whatever readers wait for.
class Prefetcher {
 public:
  struct Work {
    std::vector<std::shared_ptr<chunkstore::Blob>> blobs;
    PackContent pack;             // first, if there is one; what it lacks comes from the plan
    std::vector<FrameSpan> plan;  // what is on the node already is left out
    enum class Rest {
      kLeave,
      kWhenIdle,  // while no reader waits for anything
      kNow,
    };
    Rest rest = Rest::kLeave;
    uint64_t bytes_per_second = 0;  // from the origin; 0: no limit
    // Nothing that was used since then is evicted for it, so nothing that it has fetched either. None:
    // since it is started. What is streamed for readers goes by the time of its own request.
    std::optional<chunkstore::UseTime> since;
    // What it fetches is counted here; may be null.
    std::shared_ptr<chunkstore::ReadStats> stats;
    // Of the image's readers. If they fetch much of it, the rest is streamed ahead of them, as much
    // as they have read already at the most. While they read nothing this costs nothing. Null: there
    // are none.
    std::shared_ptr<chunkstore::ReadStats> readers;
    // Called once from a thread of its own when all is fetched, or with the first error; not if the
    // ticket goes before that. May be null.
    std::function<void(absl::Status)> done;
  };
  // The work goes on as long as this lives. When it goes nothing more is begun, and what is on its
  // way ends with the bytes that come next.
  class Ticket {
   public:
    virtual ~Ticket() = default;
  };

  // `store` must outlive it.
  explicit Prefetcher(chunkstore::BlobStore& store);
  // Tickets may outlive it; their work has ended.
  ~Prefetcher();

  std::unique_ptr<Ticket> Start(Work work);
  // As above, when `plan`, which may take long, has filled in what is to be done. It runs on a thread
  // of its own, and what it refers to must live until it returns, which it should do soon once it is
  // asked to stop.
  std::unique_ptr<Ticket> Start(Work work, std::function<void(const std::stop_token&, Work&)> plan);

 private:
  class Impl;
  const std::shared_ptr<Impl> impl_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_PREFETCH_PREFETCHER_H_
