// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/stored_blob.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>

namespace lamina::chunkstore {
namespace {

using std::chrono::steady_clock;

// On a full disk: what is evicted to write a frame, and how often, if others are faster or need all
// that there is.
constexpr uint64_t kFullDiskReclaim = 4 << 20;
constexpr int kFullDiskAttempts = 3;
constexpr std::chrono::milliseconds kFullDiskPause(10);

uint64_t BytesOf(const FrameRecord& frame) { return uint64_t{frame.blocks} * kBlockSize; }

std::string TextOf(const absl::Status& status) { return std::string(status.message()); }

}  // namespace

// Fetches some frames of a blob.
class StoredBlob::FetchTask : public FetchPool::Task {
 public:
  FetchTask(std::shared_ptr<StoredBlob> blob, std::vector<uint32_t> frames, Priority priority,
            UseTime since, std::shared_ptr<ReadStats> stats)
      : Task(priority, blob->origin_.id()),
        blob_(std::move(blob)),
        frames_(std::move(frames)),
        since_(since),
        stats_(stats != nullptr ? std::move(stats) : std::make_shared<ReadStats>()) {}

  void Run(Scratch& scratch) override { blob_->FetchFrames(frames_, since_, *stats_, scratch); }
  void Abandon(const absl::Status& why) override { blob_->Fail(frames_, why); }

 private:
  const std::shared_ptr<StoredBlob> blob_;
  const std::vector<uint32_t> frames_;
  const UseTime since_;
  const std::shared_ptr<ReadStats> stats_;
};

// Makes the chunk table available to the blob and its chunks to the node.
class StoredBlob::LoadChunksTask : public FetchPool::Task {
 public:
  explicit LoadChunksTask(std::shared_ptr<StoredBlob> blob)
      : Task(Priority::kPrefetch, blob->origin_.id()), blob_(std::move(blob)) {}

  void Run(Scratch& /*scratch*/) override {
    if (blob_->handles_ == 0) return Finish();
    absl::StatusOr<const ChunkTable*> chunks = blob_->LoadChunks();
    absl::Status status = chunks.status();
    if (chunks.ok()) {
      blob_->chunks_.store(*chunks, std::memory_order_release);
      status = blob_->copier_->index().AddBlob(blob_->key_, **chunks);
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
  ~Handle() {
    blob->last_used_ = blob->cache_->now();
    if (--blob->handles_ == 0) blob->local_->MarkUsed();
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const std::shared_ptr<StoredBlob> blob;
};

StoredBlob::StoredBlob(const LayerDescriptor& descriptor, std::unique_ptr<LocalBlob> local,
                       std::shared_ptr<Origin> origin, Shared shared)
    : descriptor_(descriptor),
      key_(descriptor.Key()),
      local_(std::move(local)),
      origin_(descriptor, std::move(origin)),
      pool_(std::move(shared.pool)),
      cache_(std::move(shared.cache)),
      copier_(std::move(shared.copier)),
      scheduler_(local_->frames(), local_->present(), *pool_, *cache_,
                 [this](const std::vector<uint32_t>& frames, Priority priority, UseTime since,
                        std::shared_ptr<ReadStats> stats) {
                   return std::make_shared<FetchTask>(shared_from_this(), frames, priority, since,
                                                      std::move(stats));
                 }),
      used_(local_->frames().size()) {}

std::shared_ptr<StoredBlob> StoredBlob::Create(const LayerDescriptor& descriptor,
                                               std::unique_ptr<LocalBlob> local,
                                               std::shared_ptr<Origin> origin, Shared shared) {
  const std::shared_ptr<StoredBlob> blob(
      new StoredBlob(descriptor, std::move(local), std::move(origin), std::move(shared)));
  if (blob->local_->HasLostFrames()) blob->PunchLostFrames();
  const UseTime used = blob->cache_->Opened(blob->key_, blob);
  blob->last_used_ = used;
  for (std::atomic<UseTime>& time : blob->used_) time.store(used, std::memory_order_relaxed);
  blob->local_->CountIn(blob->cache_);
  return blob;
}

StoredBlob::~StoredBlob() { cache_->Closed(key_, local_->present_bytes(), last_used_); }

std::shared_ptr<Blob> StoredBlob::NewHandle() {
  local_->MarkUsed();
  cache_->Attached();
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

Blob::Hold StoredBlob::HoldIfReady(uint64_t offset, uint64_t length) {
  Hold hold = cache_->readers().Enter();
  const FrameRange range = FramesOf(offset, length);
  for (uint32_t frame = range.first; frame < range.end; ++frame) {
    if (!scheduler_.Ready(frame)) return {};
  }
  MarkUsed(range);
  return hold;
}

void StoredBlob::MarkUsed(FrameRange frames) {
  const UseTime now = cache_->now();
  for (uint32_t frame = frames.first; frame < frames.end; ++frame) {
    std::atomic<UseTime>& used = used_[frame];
    // Most frames are used again before the clock goes on: their cache line stays clean.
    if (used.load(std::memory_order_relaxed) != now) used.store(now, std::memory_order_relaxed);
  }
}

void StoredBlob::Fetch(uint64_t offset, uint64_t length, Priority priority,
                       std::shared_ptr<ReadStats> stats, std::function<void(absl::Status)> done) {
  if (offset > local_->data_size() || length > local_->data_size() - offset) {
    done(absl::OutOfRangeError(fmt::format("{}: {} bytes at {} are past the end at {}", name(),
                                           length, offset, local_->data_size())));
    return;
  }
  const auto self = shared_from_this();  // `done` may let go of the caller's handle
  const FrameRange range = FramesOf(offset, length);
  MarkUsed(range);
  scheduler_.Fetch(range.first, range.end, priority, origin_.preferred_request_size(),
                   std::move(stats), std::move(done));
}

void StoredBlob::VisitFrames(const std::function<void(uint32_t frame, UseTime used)>& visit) const {
  local_->present().ForEach(
      [&](uint32_t frame) { visit(frame, used_[frame].load(std::memory_order_relaxed)); });
}

absl::StatusOr<uint64_t> StoredBlob::Evict(std::span<const uint32_t> frames) {
  std::vector<uint32_t> claimed;
  for (const uint32_t frame : frames) {
    if (scheduler_.ClaimToEvict(frame)) claimed.push_back(frame);
  }
  if (claimed.empty()) return 0;
  // From here to the end as data_readers.h has it. The bits in the file go first as well: a process
  // that is killed in between leaves bytes that nobody asks for.
  DataReaders& readers = cache_->readers();
  readers.BeginEviction(key_);
  uint64_t freed = 0;
  for (const uint32_t frame : claimed) freed += local_->Forget(frame);
  readers.AwaitReaders();
  absl::Status status;
  for (size_t i = 0, run = 0; i < claimed.size(); i = run) {
    for (run = i + 1; run < claimed.size() && claimed[run] == claimed[run - 1] + 1;) ++run;
    status.Update(local_->Punch(claimed[i], claimed[run - 1] + 1));
  }
  readers.EndEviction(key_);
  scheduler_.Release(claimed);
  if (!status.ok()) return status;
  return freed;
}

void StoredBlob::CheckWriteBack() {
  if (local_->WriteBackFailed()) {
    spdlog::error(
        "{}: the disk did not take what was written to the data file; frames are checked "
        "before they are used again",
        name());
    distrusted_ = 2;  // a few seconds later those that were under way at first
  }
  const bool was_cut = local_->WasCut();
  if (was_cut) {
    spdlog::error(
        "{}: somebody else has changed the size of the data file; frames are checked before they "
        "are used again",
        name());
    distrusted_ = 2;
  }
  if (distrusted_ == 0) return;
  --distrusted_;
  // As an evictor, but that the frames stay. Without their pages, which may be right for now.
  std::vector<uint32_t> claimed;
  local_->present().ForEach([&](uint32_t frame) {
    if (scheduler_.ClaimToEvict(frame)) claimed.push_back(frame);
  });
  cache_->readers().AwaitReaders();
  local_->DropPages();
  if (was_cut) {
    if (const absl::Status status = local_->RestoreSize(); !status.ok()) {
      spdlog::error("{}: {}", name(), TextOf(status));
    }
  }
  scheduler_.Release(claimed);
}

// Copies between blobs may have found a chunk in what is punched.
void StoredBlob::PunchLostFrames() {
  spdlog::warn(
      "{}: the data file has bytes of frames that are not known to be there any more; they "
      "are removed",
      name());
  DataReaders& readers = cache_->readers();
  readers.BeginEviction(key_);
  readers.AwaitReaders();
  if (const absl::Status status = local_->PunchLostFrames(); !status.ok()) {
    spdlog::warn("{}: {}", name(), TextOf(status));
  }
  readers.EndEviction(key_);
}

void StoredBlob::FetchFrames(std::span<const uint32_t> frames, UseTime since, ReadStats& stats,
                             Scratch& scratch) {
  if (handles_ == 0) return Fail(frames, absl::CancelledError("the blob is no longer used"));
  const absl::StatusOr<std::span<std::byte>> frame_buffer = scratch.Frame();
  const absl::StatusOr<std::span<std::byte>> batch_buffer = scratch.Batch();
  if (!frame_buffer.ok()) return Fail(frames, frame_buffer.status());
  if (!batch_buffer.ok()) return Fail(frames, batch_buffer.status());

  Work work{frames, since, stats, *frame_buffer, *batch_buffer};
  std::vector<uint32_t> missing;
  uint32_t done = 0;  // frames before it are
  for (const uint32_t frame : frames) {
    if (frame < done) continue;  // it came with a chunk that a frame before it is a part of
    std::optional<uint32_t> end = CheckPresent(frame, work);
    if (!end.has_value()) end = CopyFromOthers(frame, work);
    if (end.has_value()) {
      done = *end;
    } else {
      missing.push_back(frame);
    }
  }
  for (std::span<const uint32_t> rest = missing; !rest.empty();) {
    work.frames = FittingBatch(rest);
    FetchFromOrigin(work);
    rest = rest.subspan(work.frames.size());
  }
}

std::optional<uint32_t> StoredBlob::CheckPresent(uint32_t frame, const Work& work) {
  if (!local_->present().Test(frame)) return std::nullopt;
  if (local_->CheckFrame(frame, work.frame_buffer)) {
    scheduler_.Complete(frame, absl::OkStatus());
    return frame + 1;
  }
  if (MayLog()) {
    spdlog::warn("{}: frame {} is damaged on the local disk and is fetched again", name(), frame);
  }
  return std::nullopt;
}

std::optional<uint32_t> StoredBlob::CopyFromOthers(uint32_t frame, const Work& work) {
  const ChunkTable* chunks = chunks_.load(std::memory_order_acquire);
  if (chunks == nullptr) return std::nullopt;
  {
    // Or frames would be taken from others who fetch them in one request.
    const DataReaders::Section section = cache_->readers().Enter();
    if (!copier_->MayHave(key_, *chunks, frames(), frame, cache_->readers())) return std::nullopt;
  }
  // All frames of a large chunk come at once, as far as this task holds them or nobody does. Not those
  // that are being read: sharing blocks lets go of the pages that it replaces, as a hole does.
  const FrameRange whole = ChunkCopier::FramesOfChunk(*chunks, frames(), frame);
  FrameRange range{frame, frame + 1};
  std::vector<uint32_t> claimed;
  const auto take = [&](uint32_t other) {
    if (scheduler_.Ready(other)) return false;
    if (other > frame && std::ranges::binary_search(work.frames, other)) return true;
    if (!scheduler_.Claim(other)) return false;
    claimed.push_back(other);
    return !scheduler_.Ready(other);  // it may have become so before the claim
  };
  while (range.first > whole.first && take(range.first - 1)) --range.first;
  while (range.end < whole.end && take(range.end)) ++range.end;
  // Those that were taken and do not belong to it after all.
  const auto outside = [&](uint32_t other) { return other < range.first || other >= range.end; };
  const auto rest = std::partition(claimed.begin(), claimed.end(), std::not_fn(outside));
  scheduler_.Release(std::span<const uint32_t>(claimed).subspan(rest - claimed.begin()));
  claimed.erase(rest, claimed.end());

  uint64_t bytes = 0;
  for (uint32_t i = range.first; i < range.end; ++i) bytes += BytesOf(frames()[i]);
  absl::StatusOr<uint64_t> written = absl::NotFoundError("no room");
  if (const auto room = cache_->MakeRoom(bytes, work.since); room.ok()) {
    const DataReaders::Section section = cache_->readers().Enter();
    written =
        copier_->Copy(key_, *chunks, frame, range, *local_, cache_->readers(), work.batch_buffer);
  }
  if (!written.ok()) {
    if (!absl::IsNotFound(written.status())) PunchMissing(range);
    scheduler_.Release(claimed);
    return std::nullopt;
  }
  work.stats.copied_frames += range.end - range.first;
  work.stats.written_bytes += *written;
  cache_->Tick();
  MarkUsed(range);
  for (uint32_t i = range.first; i < range.end; ++i) scheduler_.Complete(i, absl::OkStatus());
  return range.end;
}

std::span<const uint32_t> StoredBlob::FittingBatch(std::span<const uint32_t> frames) const {
  uint64_t bytes = 0;
  size_t count = 0;
  while (count < frames.size() && bytes + this->frames()[frames[count]].length <= kBatchBuffer) {
    bytes += this->frames()[frames[count++]].length;
  }
  return frames.first(count);
}

void StoredBlob::FetchFromOrigin(const Work& work) {
  // Before anything is read: a prefetch that has no room shall not cost the origin anything.
  std::vector<NodeCache::Room> rooms;
  absl::Status full;
  for (const uint32_t frame : work.frames) {
    absl::StatusOr<NodeCache::Room> room = cache_->MakeRoom(BytesOf(frames()[frame]), work.since);
    full = room.status();
    if (!full.ok()) break;
    rooms.push_back(*std::move(room));
  }
  const std::span<const uint32_t> wanted = work.frames.first(rooms.size());
  if (!full.ok()) scheduler_.GiveUpPrefetch(work.frames.subspan(rooms.size()), full);
  if (wanted.empty()) return;

  // The compressed frames lie in the buffer one behind the other; neighbours are one range.
  std::span<std::byte> batch_buffer = work.batch_buffer;
  std::vector<RangeRead> ranges;
  uint64_t bytes = 0;
  for (const uint32_t frame : wanted) {
    const FrameRecord& record = frames()[frame];
    if (!ranges.empty() && ranges.back().offset + ranges.back().into.size() == record.offset) {
      std::span<std::byte>& into = ranges.back().into;
      into = {into.data(), into.size() + record.length};
    } else {
      ranges.push_back({record.offset, batch_buffer.subspan(bytes, record.length)});
    }
    bytes += record.length;
  }
  const uint64_t order = origin_.order();
  const absl::Status status = ReadFromOrigin(ranges);
  work.stats.origin_requests += ranges.size();
  if (!status.ok()) return Fail(wanted, status);
  work.stats.fetched_bytes += bytes;
  work.stats.fetched_frames += wanted.size();
  work.stats.activity.Wake();
  for (size_t i = 0; i < wanted.size(); ++i) {
    const uint64_t length = frames()[wanted[i]].length;
    const NodeCache::Room room = std::move(rooms[i]);  // until it is written
    const std::span<std::byte> compressed = batch_buffer.first(length);
    absl::Status stored = StoreFrame(wanted[i], compressed, work);
    if (absl::IsDataLoss(stored) && origin_.Distrust(order, 0)) {
      const RangeRead again{frames()[wanted[i]].offset, compressed};
      const auto read_again = [&]() -> absl::Status {
        RETURN_IF_ERROR(ReadFromOrigin(std::span(&again, 1)));
        return StoreFrame(wanted[i], compressed, work);
      };
      stored = origin_.UntilRight(read_again, /*tried=*/1);
    }
    batch_buffer = batch_buffer.subspan(length);
    if (stored.ok()) {
      scheduler_.Complete(wanted[i], stored);
    } else {
      Fail(wanted.subspan(i, 1), stored);
    }
  }
}

absl::Status StoredBlob::ReadFromOrigin(std::span<const RangeRead> ranges) {
  const FetchPool::OriginWait wait(*pool_, origin_.id());
  return origin_.Read(ranges);
}

absl::Status StoredBlob::StoreFrame(uint32_t frame, std::span<const std::byte> compressed,
                                    const Work& work) {
  const FrameRecord& record = frames()[frame];
  const std::span<std::byte> bytes = work.frame_buffer.first(BytesOf(record));
  RETURN_IF_ERROR(DecodeFrame(record, compressed, bytes), "{}", origin_.name());
  work.stats.decompressed_bytes += bytes.size();
  // Or every process would find the frame wrong and fetch it anew.
  if (!FrameIsIntact(record, bytes)) {
    return absl::DataLossError("the frame table has a wrong checksum of its content");
  }
  RETURN_IF_ERROR(WriteFrame(frame, bytes));
  if (!local_->in_memory()) work.stats.written_bytes += bytes.size();
  return absl::OkStatus();
}

// On a disk that others have filled, what is evicted makes room.
absl::Status StoredBlob::WriteFrame(uint32_t frame, std::span<const std::byte> bytes) {
  cache_->Tick();
  MarkUsed({frame, frame + 1});
  absl::Status status = local_->WriteFrame(frame, bytes);
  for (int i = 0; i < kFullDiskAttempts && absl::IsResourceExhausted(status); ++i) {
    if (cache_->Reclaim(kFullDiskReclaim) == 0) {
      std::this_thread::sleep_for(kFullDiskPause);  // what readers need now may be evicted then
    }
    status = local_->WriteFrame(frame, bytes);
  }
  if (!status.ok()) PunchMissing({frame, frame + 1});
  return status;
}

// Of frames that the caller holds. Copies between blobs may have found a chunk in what was written.
void StoredBlob::PunchMissing(FrameRange frames) {
  DataReaders& readers = cache_->readers();
  readers.BeginEviction(key_);
  readers.AwaitReaders();
  for (uint32_t frame = frames.first; frame < frames.end; ++frame) {
    if (!local_->present().Test(frame)) local_->Punch(frame, frame + 1).IgnoreError();
  }
  readers.EndEviction(key_);
}

absl::Status StoredBlob::ReadThrough(uint64_t offset, std::span<std::byte> into, ReadStats& stats) {
  std::vector<std::byte> buffer(kFrameSize);
  const FrameRange range = FramesOf(offset, into.size());
  for (uint32_t frame = range.first; frame < range.end; ++frame) {
    const FrameRecord& record = frames()[frame];
    const uint64_t frame_offset = uint64_t{record.first_block} * kBlockSize;
    const uint64_t from = std::max(offset, frame_offset);
    const uint64_t to = std::min(offset + into.size(), frame_offset + BytesOf(record));
    const std::span<std::byte> part = into.subspan(from - offset, to - from);
    if (const Hold hold = HoldIfReady(from, part.size()); hold) {
      RETURN_IF_ERROR(ReadFull(data_fd(), from, part), "{}", name());
      continue;
    }
    RETURN_IF_ERROR(ReadFrameThrough(frame, buffer, stats), "{}: frame {}", name(), frame);
    std::copy_n(buffer.begin() + static_cast<ptrdiff_t>(from - frame_offset), part.size(),
                part.begin());
  }
  // What lies past the address space.
  const uint64_t rest =
      offset + into.size() - std::min(std::max(offset, size()), offset + into.size());
  std::ranges::fill(into.last(rest), std::byte{0});
  return absl::OkStatus();
}

absl::Status StoredBlob::ReadFrameThrough(uint32_t frame, std::span<std::byte> into,
                                          ReadStats& stats) {
  const FrameRecord& record = frames()[frame];
  std::vector<std::byte> compressed(record.length);
  const RangeRead read{record.offset, compressed};
  const auto read_and_decode = [&]() -> absl::Status {
    ++stats.origin_requests;
    RETURN_IF_ERROR(origin_.Read(std::span(&read, 1)));
    stats.fetched_bytes += compressed.size();
    return Annotate(DecodeFrame(record, compressed, into.first(BytesOf(record))), origin_.name());
  };
  RETURN_IF_ERROR(origin_.UntilRight(read_and_decode));
  ++stats.fetched_frames;
  stats.decompressed_bytes += BytesOf(record);
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
  const FetchPool::OriginWait wait(*pool_, origin_.id());
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
