// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/bulk_fetch.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

namespace lamina::chunkstore {
namespace {

// Bytes between two frames that are read and dropped rather than making two requests: what a link
// of 100 Mbit/s moves in the 20 ms that a request costs.
constexpr uint64_t kMaxGap = 256 << 10;
// Bytes of a stream whose frames are held before they come. A reader that wants one of them waits for
// it; who wants a later one has it fetched by itself.
constexpr uint64_t kHeldAhead = 1 << 20;
// Of the batch buffer, the part in which frames that come in pieces are put together.
constexpr size_t kAssembly = 512 << 10;
static_assert(kAssembly >= kMaxFrameLength && kAssembly < kBatchBuffer);

}  // namespace

// Cuts a stream into the frames of a run and stores them.
class BulkFetch::Assembler {
 public:
  // `rooms` are for the frames of the run, which are announced.
  Assembler(BulkFetch& fetch, std::span<const Frame> run, std::vector<NodeCache::Room> rooms,
            const Buffers& buffers)
      : fetch_(fetch),
        run_(run),
        rooms_(std::move(rooms)),
        assembly_(buffers.batch.first(kAssembly)),
        frame_buffer_(buffers.frame),
        position_(run.front().offset),
        is_left_out_(run.size()) {
    HoldNext();
  }

  absl::Status Take(std::span<const std::byte> bytes) {
    while (!bytes.empty() && next_ < run_.size()) {
      HoldNext();
      const Frame& frame = run_[next_];
      if (is_left_out_[next_]) {
        Skip(&bytes, frame.end() - position_);
        if (position_ == frame.end()) ++next_;
        continue;
      }
      if (position_ < frame.offset) {  // between two frames
        Skip(&bytes, frame.offset - position_);
        continue;
      }
      const uint64_t have = position_ - frame.offset;
      const uint64_t length = frame.record().length;
      const auto part = bytes.first(std::min<uint64_t>(length - have, bytes.size()));
      const bool whole = part.size() == length;
      if (!whole) std::memcpy(assembly_.data() + have, part.data(), part.size());
      Skip(&bytes, part.size());
      if (have + part.size() < length) break;
      Store(frame, whole ? part : assembly_.first(length));
      ++next_;
      RETURN_IF_ERROR(fetch_.CheckWanted(frame));
    }
    return absl::OkStatus();
  }

  // Frames that are held and did not come, or came wrong.
  std::vector<Frame> Missing() const {
    std::vector<Frame> missing = refused_;
    for (size_t i = next_; i < held_; ++i) {
      if (!is_left_out_[i]) missing.push_back(run_[i]);
    }
    return missing;
  }
  bool ended_early() const { return next_ < run_.size(); }
  const absl::Status& status() const { return status_; }

 private:
  void Skip(std::span<const std::byte>* bytes, uint64_t count) {
    const uint64_t skipped = std::min<uint64_t>(count, bytes->size());
    *bytes = bytes->subspan(skipped);
    position_ += skipped;
  }

  void HoldNext() {
    for (; held_ < run_.size() && run_[held_].offset < position_ + kHeldAhead; ++held_) {
      const Frame& frame = run_[held_];
      if (frame.blob->scheduler_.ClaimAnnounced(frame.frame)) continue;
      is_left_out_[held_] = true;
      fetch_.of_others_.push_back(frame);
    }
  }

  void Store(const Frame& frame, std::span<const std::byte> compressed) {
    const StoredBlob::Work work{{}, fetch_.options_.since, *fetch_.stats_, frame_buffer_, {}};
    const NodeCache::Room room = std::move(rooms_[next_]);  // until it is written
    const absl::Status stored = frame.blob->StoreFrame(frame.frame, compressed, work);
    if (stored.ok()) {
      fetch_.stats_->fetched_frames += 1;
      frame.blob->scheduler_.Complete(frame.frame, stored);
      return;
    }
    // Whoever wants the frame has it fetched again, from elsewhere if there is an elsewhere.
    const bool is_first = refused_.empty();
    if (is_first && absl::IsDataLoss(stored) && fetch_.options_.pack == nullptr) {
      fetch_.try_again_ = frame.blob->origin_.Distrust(fetch_.order_, fetch_.distrusted_++);
    }
    refused_.push_back(frame);
    status_.Update(Annotate(stored, fmt::format("{}: frame {}", frame.blob->name(), frame.frame)));
  }

  BulkFetch& fetch_;
  const std::span<const Frame> run_;
  std::vector<NodeCache::Room> rooms_;
  const std::span<std::byte> assembly_;
  const std::span<std::byte> frame_buffer_;
  uint64_t position_;
  size_t next_ = 0;                // frame of the run that is being put together
  size_t held_ = 0;                // frames from here on are announced only
  std::vector<bool> is_left_out_;  // a reader was faster
  std::vector<Frame> refused_;
  absl::Status status_;
};

BulkFetch::BulkFetch(Options options)
    : Task(options.priority),
      options_(std::move(options)),
      stats_(options_.stats != nullptr ? options_.stats : std::make_shared<ReadStats>()) {}

void BulkFetch::Run(Scratch& scratch) {
  const absl::StatusOr<std::span<std::byte>> batch = scratch.Batch();
  const absl::StatusOr<std::span<std::byte>> frame = scratch.Frame();
  absl::Status status = batch.status();
  status.Update(frame.status());
  if (status.ok()) status = Fetch({*batch, *frame});
  if (!status.ok() || of_others_.empty()) return options_.done(std::move(status));
  AwaitOthers();
}

void BulkFetch::AwaitOthers() {
  struct Waiting {
    std::mutex mutex;
    size_t left;
    absl::Status status;
    std::function<void(absl::Status)> done;
  };
  const auto waiting = std::make_shared<Waiting>();
  waiting->left = of_others_.size();
  waiting->done = options_.done;
  const auto came = [waiting](const absl::Status& status) {
    {
      const std::lock_guard lock(waiting->mutex);
      waiting->status.Update(status);
      if (--waiting->left > 0) return;
    }
    waiting->done(std::move(waiting->status));
  };
  for (const Frame& frame : of_others_) {
    frame.blob->scheduler_.Fetch(frame.frame, frame.frame + 1, Priority::kPrefetch,
                                 /*request_size=*/0, options_.stats, came);
  }
}

absl::Status BulkFetch::Fetch(const Buffers& buffers) {
  for (std::span<const Frame> rest(options_.frames); !rest.empty();) {
    size_t count = 0;
    uint64_t bytes = 0;
    while (count < rest.size() && bytes + rest[count].record().length <= kBulkWindow) {
      bytes += rest[count++].record().length;
    }
    RETURN_IF_ERROR(CheckWanted(rest.front()));
    absl::Status status = FetchWindow(rest.first(count), buffers);
    // What came wrong is missing still. Another origin may have it right.
    while (absl::IsDataLoss(status) && std::exchange(try_again_, false)) {
      status = FetchWindow(rest.first(count), buffers);
    }
    RETURN_IF_ERROR(status);
    rest = rest.subspan(count);
  }
  return absl::OkStatus();
}

absl::Status BulkFetch::FetchWindow(std::span<const Frame> window, const Buffers& buffers) {
  const std::vector<Frame> missing = TakeLocal(Claim(window), buffers);
  // Readers who want one of them while another part of the window comes do not wait for its turn.
  for (const Frame& frame : missing) frame.blob->scheduler_.Announce(frame.frame);
  absl::Status status;
  for (std::span<const Frame> rest(missing); !rest.empty();) {
    size_t count = 1;
    const auto joins = [&](const Frame& next) {
      return next.offset - rest[count - 1].end() <= kMaxGap &&
             next.end() - rest.front().offset <= kBulkWindow;
    };
    while (count < rest.size() && joins(rest[count])) ++count;
    const std::span<const Frame> run = rest.first(count);
    if (status.ok()) status = FetchRun(run, buffers);
    for (const Frame& frame : run) frame.blob->scheduler_.Withdraw(frame.frame);
    rest = rest.subspan(count);
  }
  return status;
}

std::vector<BulkFetch::Frame> BulkFetch::Claim(std::span<const Frame> window) {
  std::vector<Frame> claimed;
  for (const Frame& frame : window) {
    FetchScheduler& scheduler = frame.blob->scheduler_;
    if (scheduler.Ready(frame.frame)) continue;
    (scheduler.Claim(frame.frame) ? claimed : of_others_).push_back(frame);
  }
  return claimed;
}

std::vector<BulkFetch::Frame> BulkFetch::TakeLocal(std::span<const Frame> claimed,
                                                   const Buffers& buffers) {
  // Frames of one blob, ascending, of which a large chunk may bring several at once.
  std::vector<uint32_t> held;
  if (options_.pack == nullptr) {
    for (const Frame& frame : claimed) held.push_back(frame.frame);
  }
  const StoredBlob::Work work{held, options_.since, *stats_, buffers.frame, buffers.batch};
  std::vector<Frame> missing;
  uint32_t done = 0;  // frames of the one blob before it are
  for (const Frame& frame : claimed) {
    if (options_.pack == nullptr && frame.frame < done) continue;
    std::optional<uint32_t> end = frame.blob->CheckPresent(frame.frame, work);
    if (!end.has_value()) end = frame.blob->CopyFromOthers(frame.frame, work);
    if (end.has_value()) {
      done = *end;
    } else {
      missing.push_back(frame);
    }
  }
  return missing;
}

absl::Status BulkFetch::FetchRun(std::span<const Frame> run, const Buffers& buffers) {
  // Readers may have been faster.
  const auto is_others = [&](const Frame& frame) {
    if (frame.blob->scheduler_.IsAnnounced(frame.frame)) return false;
    of_others_.push_back(frame);
    return true;
  };
  while (!run.empty() && is_others(run.front())) run = run.subspan(1);
  while (!run.empty() && is_others(run.back())) run = run.first(run.size() - 1);
  if (run.empty()) return absl::OkStatus();
  // Before anything is read: without room it shall not cost the origin anything.
  std::vector<NodeCache::Room> rooms;
  absl::Status full;
  for (const Frame& frame : run) {
    const uint64_t bytes = uint64_t{frame.record().blocks} * kBlockSize;
    absl::StatusOr<NodeCache::Room> room = frame.blob->cache_->MakeRoom(bytes, options_.since);
    full = room.status();
    if (!full.ok()) break;
    rooms.push_back(*std::move(room));
  }
  run = run.first(rooms.size());
  if (run.empty()) return full;

  Assembler assembler(*this, run, std::move(rooms), buffers);
  const uint64_t length = run.back().end() - run.front().offset;
  const std::span<std::byte> io_buffer = buffers.batch.subspan(kAssembly);
  const auto take = [&](std::span<const std::byte> bytes) {
    stats_->fetched_bytes += bytes.size();
    return assembler.Take(bytes);
  };
  stats_->origin_requests += 1;
  if (options_.pack == nullptr) order_ = run.front().blob->origin_.order();
  absl::Status status =
      options_.pack != nullptr
          ? options_.pack->Stream(run.front().offset, length, io_buffer, take)
          : run.front().blob->origin_.Stream(run.front().offset, length, io_buffer, take);
  status.Update(assembler.status());
  const std::vector<Frame> missing = assembler.Missing();
  if (status.ok() && assembler.ended_early()) {
    status = absl::DataLossError("the origin's answer ended early");
  }
  Release(missing);
  status.Update(full);
  return status;
}

void BulkFetch::Release(std::span<const Frame> frames) {
  for (const Frame& frame : frames) frame.blob->scheduler_.Release(std::span(&frame.frame, 1));
}

absl::Status BulkFetch::CheckWanted(const Frame& frame) const {
  if (options_.stop.stop_requested()) return absl::CancelledError("the prefetch was stopped");
  if (frame.blob->handles_ == 0) return absl::CancelledError("the blob is no longer used");
  return absl::OkStatus();
}

void StoredBlob::FetchBulk(uint32_t first, uint32_t end, Priority priority,
                           std::optional<UseTime> since, std::shared_ptr<ReadStats> stats,
                           std::stop_token stop, std::function<void(absl::Status)> done) {
  BulkFetch::Options options{.since = since.has_value() ? *since : cache_->Tick(),
                             .priority = priority,
                             .stats = std::move(stats),
                             .stop = std::move(stop),
                             .done = std::move(done)};
  const std::shared_ptr<StoredBlob> self = shared_from_this();
  for (uint32_t frame = first; frame < std::min(end, frames().size()); ++frame) {
    options.frames.push_back({self, frame, frames()[frame].offset});
  }
  pool_->Add(std::make_shared<BulkFetch>(std::move(options)));
}

}  // namespace lamina::chunkstore
