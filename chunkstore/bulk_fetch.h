// SPDX-License-Identifier: Apache-2.0
//
// Large requests for frames that are expected to be read, from their blob or from a pack. They
// decide what to fetch when their turn comes and not before, so that a reader that is faster never
// waits for one in the queue.
#ifndef LAMINA_CHUNKSTORE_BULK_FETCH_H_
#define LAMINA_CHUNKSTORE_BULK_FETCH_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "chunkstore/fetch_pool.h"
#include "chunkstore/stored_blob.h"

namespace lamina::chunkstore {

// Works through its frames in windows of kBulkWindow: claims what is missing, takes what the node
// has, and streams the rest, of which it holds what is about to come. What others have under way is
// left to them, and waited for at the end: when `done` is called with kOk, every frame was there.
class BulkFetch : public FetchPool::Task {
 public:
  struct Frame {
    std::shared_ptr<StoredBlob> blob;
    uint32_t frame = 0;
    uint64_t offset = 0;  // in what is read
    const FrameRecord& record() const { return blob->frames()[frame]; }
    uint64_t end() const { return offset + record().length; }
  };
  struct Options {
    std::vector<Frame> frames;           // by ascending offsets, without overlap
    std::shared_ptr<OriginObject> pack;  // null: the frames are of one blob, from its origin
    UseTime since = 0;                   // only what was last used before may be evicted for them
    Priority priority = Priority::kBulk;
    std::shared_ptr<ReadStats> stats;  // may be null
    std::stop_token stop;
    std::function<void(absl::Status)> done;
  };
  explicit BulkFetch(Options options);

  void Run(Scratch& scratch) override;
  void Abandon(const absl::Status& why) override { options_.done(why); }

 private:
  struct Buffers {
    std::span<std::byte> batch;
    std::span<std::byte> frame;
  };
  class Assembler;

  absl::Status Fetch(const Buffers& buffers);
  absl::Status FetchWindow(std::span<const Frame> window, const Buffers& buffers);
  // The frames of a window that are neither there nor under way; they are held from now on.
  std::vector<Frame> Claim(std::span<const Frame> window);
  // Calls `done` once the frames that others had under way are there. They may have let go of them.
  void AwaitOthers();
  // Completes those that the node has, and returns the others.
  std::vector<Frame> TakeLocal(std::span<const Frame> claimed, const Buffers& buffers);
  absl::Status FetchRun(std::span<const Frame> run, const Buffers& buffers);
  static size_t OriginOf(std::span<const Frame> frames);
  // Lets go of frames that did not come: who waits for one has it fetched by itself.
  static void Release(std::span<const Frame> frames);
  absl::Status CheckWanted(const Frame& frame) const;

  const Options options_;
  const std::shared_ptr<ReadStats> stats_;
  std::vector<Frame> of_others_;
  uint64_t order_ = 0;      // of the blob's origins, when the stream began
  size_t distrusted_ = 0;   // origins of wrong bytes
  bool try_again_ = false;  // there is another origin
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_BULK_FETCH_H_
