// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/blob_reply.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <string>
#include <vector>

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::ReadStats;
using Clock = std::chrono::steady_clock;

// Up to here copying through a buffer is faster than three splice calls through a pipe.
constexpr uint64_t kSpliceFrom = 64 * 1024;

uint64_t TotalLength(std::span<const ContentPiece> pieces) {
  uint64_t total = 0;
  for (const ContentPiece& piece : pieces) total += piece.length;
  return total;
}

// Keeps the content of all pieces where it is while they are read; true if it is there. Most
// requests are one piece.
class ContentHold {
 public:
  explicit ContentHold(std::span<const ContentPiece> pieces) {
    for (const ContentPiece& piece : pieces) {
      if (piece.blob == nullptr) continue;
      Blob::Hold hold = piece.blob->HoldIfReady(piece.offset, piece.length);
      if (!hold) {
        all_ = false;
        return;
      }
      if (first_) {
        others_.push_back(std::move(hold));
      } else {
        first_ = std::move(hold);
      }
    }
  }
  bool all() const { return all_; }

 private:
  bool all_ = true;
  Blob::Hold first_;
  std::vector<Blob::Hold> others_;
};

absl::Status CopyPiece(const ContentPiece& piece, std::span<std::byte> into) {
  if (piece.blob != nullptr) {
    RETURN_IF_ERROR(ReadFull(piece.blob->data_fd(), piece.offset, into), "blob {}",
                    piece.blob->descriptor().digest.ToString());
  } else if (piece.memory != nullptr) {
    std::copy_n(piece.memory, piece.length, into.begin());
  } else {
    std::fill(into.begin(), into.end(), std::byte{0});
  }
  return absl::OkStatus();
}

absl::Status CopyContent(std::span<const ContentPiece> pieces, std::span<std::byte> into) {
  for (const ContentPiece& piece : pieces) {
    RETURN_IF_ERROR(CopyPiece(piece, into.first(piece.length)));
    into = into.subspan(piece.length);
  }
  return absl::OkStatus();
}

// Always EIO: a reader must not take a missing blob (kNotFound) for a missing file.
void ReplyError(fuse_req_t request, ReadStats& stats) {
  stats.failed_requests.fetch_add(1, std::memory_order_relaxed);
  ::fuse_reply_err(request, EIO);
}

void ReplyByCopy(fuse_req_t request, std::span<const ContentPiece> pieces,
                 std::span<std::byte> buffer, ReadStats& stats) {
  const absl::Status status = CopyContent(pieces, buffer);
  if (!status.ok()) {
    spdlog::warn("read failed: {}", std::string(status.message()));
    return ReplyError(request, stats);
  }
  ::fuse_reply_buf(request, reinterpret_cast<const char*>(buffer.data()), buffer.size());
}

void ReplyByCopy(fuse_req_t request, std::span<const ContentPiece> pieces, ReadStats& stats) {
  const uint64_t length = TotalLength(pieces);
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(length);
  ReplyByCopy(request, pieces, std::span(buffer.get(), length), stats);
}

// Pages go from the data file to the reader through a pipe, without passing through this process.
// libfuse empties the pipe before it returns, and without FUSE_BUF_SPLICE_MOVE the kernel copies
// out of the pages: when this returns, the data file may lose the content.
// For threads of the session only: libfuse makes a pipe for each thread and session and closes it
// when the thread ends, which must be before the session does.
void ReplyBySplice(fuse_req_t request, const ContentPiece& piece) {
  fuse_bufvec content = FUSE_BUFVEC_INIT(piece.length);
  content.buf[0].flags = static_cast<fuse_buf_flags>(FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK);
  content.buf[0].fd = piece.blob->data_fd();
  content.buf[0].pos = static_cast<off_t>(piece.offset);
  ::fuse_reply_data(request, &content, fuse_buf_copy_flags{});
}

// On a thread of the session, with all content held.
void ReplyNow(fuse_req_t request, std::span<const ContentPiece> pieces, ReadStats& stats) {
  const uint64_t length = TotalLength(pieces);
  if (length < kSpliceFrom) {
    std::array<std::byte, kSpliceFrom> buffer;
    ReplyByCopy(request, pieces, std::span(buffer).first(length), stats);
  } else if (pieces.size() == 1 && pieces[0].blob != nullptr) {
    ReplyBySplice(request, pieces[0]);
  } else {
    ReplyByCopy(request, pieces, stats);
  }
}

// A request whose content is being fetched. Shared by the fetches: each copies its piece when it is
// done, since that is how long the piece is sure to stay, and the last to end answers the request.
class PendingReply {
 public:
  PendingReply(fuse_req_t request, std::span<const ContentPiece> pieces,
               std::shared_ptr<ReadStats> stats, Clock::time_point start)
      : session_(FuseSession::Of(request)),
        request_(request),
        pieces_(pieces.begin(), pieces.end()),
        length_(TotalLength(pieces)),
        stats_(std::move(stats)),
        start_(start) {
    session_.BeginReply();
    stats_->waiting_requests.fetch_add(1, std::memory_order_relaxed);
  }

  static void FetchAndReply(const std::shared_ptr<PendingReply>& self) {
    // One more than pieces, so that `pieces_` stays until the loop is through with it.
    self->unfinished_ = self->pieces_.size() + 1;
    uint64_t offset = 0;
    for (const ContentPiece& piece : self->pieces_) {
      const auto done = [self, &piece, offset](const absl::Status& status) {
        const bool no_room = absl::IsResourceExhausted(status);
        self->Finish(status.ok() || no_room ? self->Copy(piece, offset, no_room) : status);
      };
      if (piece.blob == nullptr) {
        done(absl::OkStatus());
      } else {
        piece.blob->Fetch(piece.offset, piece.length, chunkstore::Priority::kForeground,
                          self->stats_, done);
      }
      offset += piece.length;
    }
    self->Finish(absl::OkStatus());
  }

 private:
  // With `no_room` the piece could not be fetched, for want of room to put it.
  absl::Status Copy(const ContentPiece& piece, uint64_t offset, bool no_room) {
    {
      std::lock_guard lock(mutex_);
      // Not before: many requests may wait for an origin that does not answer.
      if (buffer_ == nullptr) buffer_ = std::make_unique_for_overwrite<std::byte[]>(length_);
    }
    const std::span<std::byte> into(buffer_.get() + offset, piece.length);
    absl::Status status =
        no_room ? piece.blob->ReadThrough(piece.offset, into, *stats_) : CopyPiece(piece, into);
    if (!status.ok()) spdlog::warn("read failed: {}", std::string(status.message()));
    return status;
  }

  void Finish(const absl::Status& status) {
    {
      std::lock_guard lock(mutex_);
      if (error_.ok()) error_ = status;
      if (--unfinished_ > 0) return;
    }
    if (error_.ok()) {
      ::fuse_reply_buf(request_, reinterpret_cast<const char*>(buffer_.get()), length_);
    } else {
      const auto code = static_cast<size_t>(error_.code());
      if (code < stats_->errors.size()) {
        stats_->errors[code].fetch_add(1, std::memory_order_relaxed);
      }
      ReplyError(request_, *stats_);  // the store has logged it, once for all who waited
    }
    stats_->miss_latency.Add(Clock::now() - start_);
    stats_->waiting_requests.fetch_sub(1, std::memory_order_relaxed);
    // Blobs may be the store's last: they go before the session that whoever stops us waits for.
    pieces_.clear();
    session_.EndReply();
  }

  FuseSession& session_;
  const fuse_req_t request_;
  std::vector<ContentPiece> pieces_;
  const uint64_t length_;
  const std::shared_ptr<ReadStats> stats_;
  const Clock::time_point start_;

  std::mutex mutex_;
  std::unique_ptr<std::byte[]> buffer_;
  size_t unfinished_ = 0;
  absl::Status error_;  // the first
};

}  // namespace

void ReplyWithContent(fuse_req_t request, std::span<const ContentPiece> pieces,
                      const std::shared_ptr<ReadStats>& stats) {
  const Clock::time_point start = Clock::now();
  stats->read_requests.fetch_add(1, std::memory_order_relaxed);
  stats->read_bytes.fetch_add(TotalLength(pieces), std::memory_order_relaxed);
  stats->activity.Wake();
  if (stats->touches.recording()) {
    for (const ContentPiece& piece : pieces) {
      if (piece.blob != nullptr) stats->touches.Note(*piece.blob, piece.offset, piece.length);
    }
  }
  if (const ContentHold hold(pieces); hold.all()) {
    ReplyNow(request, pieces, *stats);
    stats->hit_latency.Add(Clock::now() - start);
    return;
  }
  stats->missed_requests.fetch_add(1, std::memory_order_relaxed);
  PendingReply::FetchAndReply(std::make_shared<PendingReply>(request, pieces, stats, start));
}

}  // namespace lamina::fs
