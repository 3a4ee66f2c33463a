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
#include <span>
#include <vector>

#include "chunkstore/blob_store.h"
#include "chunkstore/chunk_copier.h"
#include "chunkstore/fetch_pool.h"
#include "chunkstore/fetch_scheduler.h"
#include "chunkstore/local_blob.h"
#include "chunkstore/origin_blob.h"

namespace lamina::chunkstore {

// Tasks keep the object alive; users hold it through handles. When the last handle goes, fetches
// that have not begun fail with kCancelled, so that no work goes on for a blob nobody uses.
class StoredBlob : public Blob, public std::enable_shared_from_this<StoredBlob> {
 public:
  // `copier` is null if there is no copying between blobs.
  StoredBlob(const LayerDescriptor& descriptor, std::unique_ptr<LocalBlob> local,
             std::shared_ptr<Origin> origin, std::shared_ptr<FetchPool> pool,
             std::shared_ptr<ChunkCopier> copier);

  // What users get.
  std::shared_ptr<Blob> NewHandle();
  void SetOrigin(std::shared_ptr<Origin> origin) { origin_.SetOrigin(std::move(origin)); }

  const LayerDescriptor& descriptor() const override { return descriptor_; }
  uint64_t size() const override { return uint64_t{blocks()} * kBlockSize; }
  uint32_t blocks() const override { return local_->sections().blocks; }
  std::span<const std::byte> metadata() const override { return local_->metadata(); }
  const FrameTable& frames() const override { return local_->frames(); }
  int data_fd() const override { return local_->data_fd(); }
  bool Ready(uint64_t offset, uint64_t length) const override;
  void Fetch(uint64_t offset, uint64_t length, Priority priority, std::shared_ptr<ReadStats> stats,
             std::function<void(absl::Status)> done) override;
  void ShareChunks() override;
  uint64_t present_frames() const override { return local_->present().count(); }

 private:
  class FetchTask;
  class LoadChunksTask;
  struct Handle;
  struct FrameRange {
    uint32_t first = 0;
    uint32_t end = 0;
  };

  // The frames that hold the bytes; what lies past the address space is in none.
  FrameRange FramesOf(uint64_t offset, uint64_t length) const;

  // The work of a fetch, on a thread of the pool: what is on the disk already, else from other
  // blobs, else from the origin.
  void FetchFrames(std::span<const uint32_t> frames, ReadStats& stats, Scratch& scratch);
  bool FetchLocally(uint32_t frame, ReadStats& stats, std::span<std::byte> frame_buffer,
                    std::span<std::byte> batch_buffer);
  void FetchFromOrigin(std::span<const uint32_t> frames, ReadStats& stats,
                       std::span<std::byte> frame_buffer, std::span<std::byte> batch_buffer);
  absl::Status StoreFrame(uint32_t frame, std::span<const std::byte> compressed, ReadStats& stats,
                          std::span<std::byte> buffer);
  void Fail(std::span<const uint32_t> frames, const absl::Status& why);
  // The first of `frames` that together fit the batch buffer.
  std::span<const uint32_t> FittingBatch(std::span<const uint32_t> frames) const;

  absl::StatusOr<const ChunkTable*> LoadChunks();
  // True at most once a second.
  bool MayLog();
  std::string name() const { return "blob " + descriptor_.digest.ToString(); }

  const LayerDescriptor descriptor_;
  const std::unique_ptr<LocalBlob> local_;
  OriginBlob origin_;
  const std::shared_ptr<FetchPool> pool_;
  const std::shared_ptr<ChunkCopier> copier_;
  FetchScheduler scheduler_;
  std::atomic<int> handles_{0};
  std::atomic<bool> loading_chunks_{false};
  std::atomic<const ChunkTable*> chunks_{nullptr};
  std::atomic<std::chrono::steady_clock::duration> logged_at_{};
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_STORED_BLOB_H_
