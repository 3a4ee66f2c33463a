// SPDX-License-Identifier: Apache-2.0
//
// The Blob of a BlobStore: joins the local files, the origin and the scheduler, and does the work
// of a fetch.
#ifndef LAMINA_CHUNKSTORE_STORED_BLOB_H_
#define LAMINA_CHUNKSTORE_STORED_BLOB_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "chunkstore/blob_store.h"
#include "chunkstore/chunk_copier.h"
#include "chunkstore/fetch_pool.h"
#include "chunkstore/fetch_scheduler.h"
#include "chunkstore/local_blob.h"
#include "chunkstore/node_cache.h"
#include "chunkstore/origin_blob.h"

namespace lamina::chunkstore {

// Tasks keep the object alive; users hold it through handles. When the last handle goes, fetches
// that have not begun fail with kCancelled, so that no work goes on for a blob nobody uses.
class StoredBlob : public Blob, public CachedBlob, public std::enable_shared_from_this<StoredBlob> {
 public:
  // What the blobs of a store share. `copier` is null if there is no copying between blobs.
  struct Shared {
    std::shared_ptr<FetchPool> pool;
    std::shared_ptr<NodeCache> cache;
    std::shared_ptr<ChunkCopier> copier;
  };
  static std::shared_ptr<StoredBlob> Create(const LayerDescriptor& descriptor,
                                            std::unique_ptr<LocalBlob> local,
                                            std::shared_ptr<Origin> origin, Shared shared);
  ~StoredBlob() override;

  // What users get.
  std::shared_ptr<Blob> NewHandle();
  void AddOrigin(std::shared_ptr<Origin> origin) { origin_.AddOrigin(std::move(origin)); }

  const LayerDescriptor& descriptor() const override { return descriptor_; }
  uint64_t size() const override { return uint64_t{blocks()} * kBlockSize; }
  uint32_t blocks() const override { return local_->sections().blocks; }
  std::span<const std::byte> metadata() const override { return local_->metadata(); }
  const Digest& content_digest() const override { return local_->content_digest(); }
  const FrameTable& frames() const override { return local_->frames(); }
  int data_fd() const override { return local_->data_fd(); }
  bool Ready(uint64_t offset, uint64_t length) const override;
  Hold HoldIfReady(uint64_t offset, uint64_t length) override;
  void Fetch(uint64_t offset, uint64_t length, Priority priority, std::shared_ptr<ReadStats> stats,
             std::function<void(absl::Status)> done) override;
  void ShareChunks() override;
  absl::Status ReadThrough(uint64_t offset, std::span<std::byte> into, ReadStats& stats) override;
  void FetchBulk(uint32_t first, uint32_t end, Priority priority, std::optional<UseTime> since,
                 std::shared_ptr<ReadStats> stats, std::stop_token stop,
                 std::function<void(absl::Status)> done) override;
  bool Present(uint32_t frame) const override { return local_->present().Test(frame); }
  uint64_t present_frames() const override { return local_->present().count(); }
  uint64_t present_bytes() const override { return local_->present_bytes(); }
  bool attached() const override { return handles_ > 0; }

  void VisitFrames(const std::function<void(uint32_t frame, UseTime used)>& visit) const override;
  absl::StatusOr<uint64_t> Evict(std::span<const uint32_t> frames) override;
  void CheckWriteBack() override;

 private:
  friend class BulkFetch;
  class FetchTask;
  class LoadChunksTask;
  struct Handle;
  using FrameRange = ChunkCopier::FrameRange;
  class Claims;

  StoredBlob(const LayerDescriptor& descriptor, std::unique_ptr<LocalBlob> local,
             std::shared_ptr<Origin> origin, Shared shared);

  // The frames that hold the bytes; what lies past the address space is in none.
  FrameRange FramesOf(uint64_t offset, uint64_t length) const;

  void MarkUsed(FrameRange frames);

  // What a task works on: frames that it holds, and where the time of use of what may be evicted
  // for them ends.
  struct Work {
    std::span<const uint32_t> frames;
    UseTime since;
    ReadStats& stats;
    std::span<std::byte> frame_buffer;
    std::span<std::byte> batch_buffer;
  };
  // The work of a fetch, on a thread of the pool: what is on the disk already, else from other
  // blobs, else from the origin.
  void FetchFrames(std::span<const uint32_t> frames, UseTime since, ReadStats& stats,
                   Scratch& scratch);
  // Both return the frame up to before which all is done, or nothing.
  std::optional<uint32_t> CheckPresent(uint32_t frame, const Work& work);
  std::optional<uint32_t> CopyFromOthers(uint32_t frame, const Work& work);
  void FetchFromOrigin(const Work& work);
  absl::Status StoreFrame(uint32_t frame, std::span<const std::byte> compressed, const Work& work);
  absl::Status WriteFrame(uint32_t frame, std::span<const std::byte> bytes);
  void PunchLostFrames();
  // After a write that failed half way, on a full disk: nothing counts what was written.
  void PunchMissing(FrameRange frames);
  absl::Status ReadFrameThrough(uint32_t frame, std::span<std::byte> into, ReadStats& stats);
  void Fail(std::span<const uint32_t> frames, const absl::Status& why);
  // The first of `frames` that together fit the batch buffer.
  std::span<const uint32_t> FittingBatch(std::span<const uint32_t> frames) const;

  absl::StatusOr<const ChunkTable*> LoadChunks();
  // True at most once a second.
  bool MayLog();
  std::string name() const { return "blob " + descriptor_.digest.ToString(); }

  const LayerDescriptor descriptor_;
  const Digest key_;
  const std::unique_ptr<LocalBlob> local_;
  OriginBlob origin_;
  const std::shared_ptr<FetchPool> pool_;
  const std::shared_ptr<NodeCache> cache_;
  const std::shared_ptr<ChunkCopier> copier_;
  FetchScheduler scheduler_;
  std::vector<std::atomic<UseTime>> used_;  // of each frame
  std::atomic<UseTime> last_used_{0};       // of the blob, if no process holds it any more
  std::atomic<int> handles_{0};
  std::atomic<bool> loading_chunks_{false};
  std::atomic<const ChunkTable*> chunks_{nullptr};
  std::atomic<std::chrono::steady_clock::duration> logged_at_{};
  int distrusted_ = 0;  // how often CheckWriteBack() is to have all frames checked again
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_STORED_BLOB_H_
