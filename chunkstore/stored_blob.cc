// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/stored_blob.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace lamina::chunkstore {
namespace {

using std::chrono::steady_clock;

uint64_t BytesOf(const FrameRecord& frame) { return uint64_t{frame.blocks} * kBlockSize; }

std::string TextOf(const absl::Status& status) { return std::string(status.message()); }

}  // namespace

// Fetches some frames of a blob.
class StoredBlob::FetchTask : public FetchPool::Task {
 public:
  FetchTask(std::shared_ptr<StoredBlob> blob, std::vector<uint32_t> frames, Priority priority,
            std::shared_ptr<ReadStats> stats)
      : Task(priority),
        blob_(std::move(blob)),
        frames_(std::move(frames)),
        stats_(stats != nullptr ? std::move(stats) : std::make_shared<ReadStats>()) {}

  void Run(Scratch& scratch) override { blob_->FetchFrames(frames_, *stats_, scratch); }
  void Abandon(const absl::Status& why) override { blob_->Fail(frames_, why); }

 private:
  const std::shared_ptr<StoredBlob> blob_;
  const std::vector<uint32_t> frames_;
  const std::shared_ptr<ReadStats> stats_;
};

// Makes the chunk table available to the blob and its chunks to the node.
class StoredBlob::LoadChunksTask : public FetchPool::Task {
 public:
  explicit LoadChunksTask(std::shared_ptr<StoredBlob> blob)
      : Task(Priority::kPrefetch), blob_(std::move(blob)) {}

  void Run(Scratch& /*scratch*/) override {
    if (blob_->handles_ == 0) return Finish();
    absl::StatusOr<const ChunkTable*> chunks = blob_->LoadChunks();
    absl::Status status = chunks.status();
    if (chunks.ok()) {
      blob_->chunks_.store(*chunks, std::memory_order_release);
      status = blob_->copier_->index().AddBlob(blob_->descriptor_.digest, **chunks);
    }
    if (!status.ok()) {
      spdlog::warn("{}: its chunks cannot be shared with other blobs: {}", blob_->name(),
                   TextOf(status));
    }
    Finish();
  }
  void Abandon(const absl::Status& /*why*/) override { Finish(); }

 private:
  void Finish() { blob_->loading_chunks_ = false; }

  const std::shared_ptr<StoredBlob> blob_;
};

struct StoredBlob::Handle {
  explicit Handle(std::shared_ptr<StoredBlob> used) : blob(std::move(used)) { ++blob->handles_; }
  ~Handle() { --blob->handles_; }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const std::shared_ptr<StoredBlob> blob;
};

StoredBlob::StoredBlob(const LayerDescriptor& descriptor, std::unique_ptr<LocalBlob> local,
                       std::shared_ptr<Origin> origin, std::shared_ptr<FetchPool> pool,
                       std::shared_ptr<ChunkCopier> copier)
    : descriptor_(descriptor),
      local_(std::move(local)),
      origin_(descriptor, std::move(origin)),
      pool_(std::move(pool)),
      copier_(std::move(copier)),
      scheduler_(local_->frames(), local_->present(), *pool_,
                 [this](const std::vector<uint32_t>& frames, Priority priority,
                        std::shared_ptr<ReadStats> stats) {
                   return std::make_shared<FetchTask>(shared_from_this(), frames, priority,
                                                      std::move(stats));
                 }) {}

std::shared_ptr<Blob> StoredBlob::NewHandle() {
  return {std::make_shared<Handle>(shared_from_this()), this};
}

void StoredBlob::ShareChunks() {
  if (copier_ == nullptr || chunks_.load() != nullptr || loading_chunks_.exchange(true)) return;
  pool_->Add(std::make_shared<LoadChunksTask>(shared_from_this()));
}

StoredBlob::FrameRange StoredBlob::FramesOf(uint64_t offset, uint64_t length) const {
  if (offset >= size() || length == 0) return {};
  const uint64_t last_byte = offset + std::min(length, size() - offset) - 1;
  const auto last_block = static_cast<uint32_t>(last_byte / kBlockSize);
  const uint32_t first = frames().Find(static_cast<uint32_t>(offset / kBlockSize));
  const FrameRecord& record = frames()[first];
  // Most ranges lie in one frame.
  const bool in_first = last_block - record.first_block < record.blocks;
  return {first, (in_first ? first : frames().Find(last_block)) + 1};
}

bool StoredBlob::Ready(uint64_t offset, uint64_t length) const {
  const FrameRange range = FramesOf(offset, length);
  for (uint32_t frame = range.first; frame < range.end; ++frame) {
    if (!scheduler_.Ready(frame)) return false;
  }
  return true;
}

void StoredBlob::Fetch(uint64_t offset, uint64_t length, Priority priority,
                       std::shared_ptr<ReadStats> stats, std::function<void(absl::Status)> done) {
  if (offset > local_->data_size() || length > local_->data_size() - offset) {
    done(absl::OutOfRangeError(fmt::format("{}: {} bytes at {} are past the end at {}", name(),
                                           length, offset, local_->data_size())));
    return;
  }
  const FrameRange range = FramesOf(offset, length);
  scheduler_.Fetch(range.first, range.end, priority, origin_.preferred_request_size(),
                   std::move(stats), std::move(done));
}

void StoredBlob::FetchFrames(std::span<const uint32_t> frames, ReadStats& stats, Scratch& scratch) {
  if (handles_ == 0) return Fail(frames, absl::CancelledError("the blob is no longer used"));
  const absl::StatusOr<std::span<std::byte>> frame_buffer = scratch.Frame();
  const absl::StatusOr<std::span<std::byte>> batch_buffer = scratch.Batch();
  if (!frame_buffer.ok()) return Fail(frames, frame_buffer.status());
  if (!batch_buffer.ok()) return Fail(frames, batch_buffer.status());

  std::vector<uint32_t> missing;
  for (const uint32_t frame : frames) {
    if (!FetchLocally(frame, stats, *frame_buffer, *batch_buffer)) missing.push_back(frame);
  }
  for (std::span<const uint32_t> rest = missing; !rest.empty();) {
    const std::span<const uint32_t> batch = FittingBatch(rest);
    FetchFromOrigin(batch, stats, *frame_buffer, *batch_buffer);
    rest = rest.subspan(batch.size());
  }
}

bool StoredBlob::FetchLocally(uint32_t frame, ReadStats& stats, std::span<std::byte> frame_buffer,
                              std::span<std::byte> batch_buffer) {
  if (scheduler_.Ready(frame)) {  // it came with a chunk that a frame before it is a part of
    scheduler_.Complete(frame, absl::OkStatus());
    return true;
  }
  if (local_->present().Test(frame)) {
    if (local_->CheckFrame(frame, frame_buffer)) {
      scheduler_.Complete(frame, absl::OkStatus());
      return true;
    }
    if (MayLog()) {
      spdlog::warn("{}: frame {} is damaged on the local disk and is fetched again", name(), frame);
    }
  }
  const ChunkTable* chunks = chunks_.load(std::memory_order_acquire);
  if (chunks == nullptr) return false;
  const auto copied = copier_->Copy(descriptor_.digest, *chunks, frame, *local_, batch_buffer);
  if (!copied.has_value()) return false;
  stats.copied_frames += copied->end_frame - copied->first_frame;
  stats.written_bytes += copied->written_bytes;
  for (uint32_t i = copied->first_frame; i < copied->end_frame; ++i) {
    scheduler_.Complete(i, absl::OkStatus());
  }
  return true;
}

std::span<const uint32_t> StoredBlob::FittingBatch(std::span<const uint32_t> frames) const {
  uint64_t bytes = 0;
  size_t count = 0;
  while (count < frames.size() && bytes + this->frames()[frames[count]].length <= kBatchBuffer) {
    bytes += this->frames()[frames[count++]].length;
  }
  return frames.first(count);
}

void StoredBlob::FetchFromOrigin(std::span<const uint32_t> frames, ReadStats& stats,
                                 std::span<std::byte> frame_buffer,
                                 std::span<std::byte> batch_buffer) {
  // The compressed frames lie in the buffer one behind the other; neighbours are one range.
  std::vector<RangeRead> ranges;
  uint64_t bytes = 0;
  for (const uint32_t frame : frames) {
    const FrameRecord& record = this->frames()[frame];
    if (!ranges.empty() && ranges.back().offset + ranges.back().into.size() == record.offset) {
      std::span<std::byte>& into = ranges.back().into;
      into = {into.data(), into.size() + record.length};
    } else {
      ranges.push_back({record.offset, batch_buffer.subspan(bytes, record.length)});
    }
    bytes += record.length;
  }
  const absl::Status status = origin_.Read(ranges);
  stats.origin_requests += ranges.size();
  if (!status.ok()) return Fail(frames, status);
  stats.fetched_bytes += bytes;
  stats.fetched_frames += frames.size();
  for (size_t i = 0; i < frames.size(); ++i) {
    const uint64_t length = this->frames()[frames[i]].length;
    const absl::Status stored =
        StoreFrame(frames[i], batch_buffer.first(length), stats, frame_buffer);
    batch_buffer = batch_buffer.subspan(length);
    if (stored.ok()) {
      scheduler_.Complete(frames[i], stored);
    } else {
      Fail(frames.subspan(i, 1), stored);
    }
  }
}

absl::Status StoredBlob::StoreFrame(uint32_t frame, std::span<const std::byte> compressed,
                                    ReadStats& stats, std::span<std::byte> buffer) {
  const FrameRecord& record = frames()[frame];
  const std::span<std::byte> bytes = buffer.first(BytesOf(record));
  RETURN_IF_ERROR(DecodeFrame(record, compressed, bytes), "{}", origin_.name());
  stats.decompressed_bytes += bytes.size();
  // Or every process would find the frame wrong and fetch it anew.
  if (!FrameIsIntact(record, bytes)) {
    return absl::DataLossError("the frame table has a wrong checksum of its content");
  }
  RETURN_IF_ERROR(local_->WriteFrame(frame, bytes));
  stats.written_bytes += bytes.size();
  return absl::OkStatus();
}

void StoredBlob::Fail(std::span<const uint32_t> frames, const absl::Status& why) {
  const FrameRecord& first = this->frames()[frames.front()];
  const FrameRecord& last = this->frames()[frames.back()];
  const absl::Status status = Annotate(
      why, fmt::format("{}: bytes {} to {} (frame {}{})", name(),
                       uint64_t{first.first_block} * kBlockSize,
                       (uint64_t{last.first_block} + last.blocks) * kBlockSize, frames.front(),
                       frames.size() > 1 ? fmt::format(" to {}", frames.back()) : ""));
  if (!absl::IsCancelled(status) && MayLog()) spdlog::error("fetch: {}", TextOf(status));
  for (const uint32_t frame : frames) scheduler_.Complete(frame, status);
}

absl::StatusOr<const ChunkTable*> StoredBlob::LoadChunks() {
  absl::StatusOr<const ChunkTable*> local = local_->LoadChunks();
  if (local.ok()) return local;
  if (!absl::IsNotFound(local.status())) {
    spdlog::warn("{}: chunk table is fetched again: {}", name(), TextOf(local.status()));
  }
  ASSIGN_OR_RETURN(const std::string decoded, origin_.ReadChunkTable(local_->sections()));
  RETURN_IF_ERROR(local_->StoreChunks(decoded));
  return local_->LoadChunks();
}

bool StoredBlob::MayLog() {
  const steady_clock::duration now = steady_clock::now().time_since_epoch();
  steady_clock::duration last = logged_at_.load();
  return now - last >= std::chrono::seconds(1) && logged_at_.compare_exchange_strong(last, now);
}

}  // namespace lamina::chunkstore
