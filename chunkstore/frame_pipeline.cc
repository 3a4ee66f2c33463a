// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/frame_pipeline.h"

#include <xxhash.h>
#include <zstd.h>

#include <system_error>

#include "chunkstore/format.h"

namespace lamina::chunkstore {

static_assert(ZSTD_COMPRESSBOUND(kFrameSize) <= kMaxFrameLength);

// What one thread reuses from frame to frame.
class FramePipeline::Worker {
 public:
  static absl::StatusOr<std::unique_ptr<Worker>> Create(int level) {
    auto worker = std::make_unique<Worker>();
    if (worker->context_ == nullptr) {
      return absl::ResourceExhaustedError("no memory for a zstd context");
    }
    // The content's size is in the frame by default, a checksum is not: the digest is stronger.
    const size_t result =
        ZSTD_CCtx_setParameter(worker->context_.get(), ZSTD_c_compressionLevel, level);
    if (ZSTD_isError(result)) {
      return absl::InvalidArgumentError(
          fmt::format("zstd level {}: {}", level, ZSTD_getErrorName(result)));
    }
    return worker;
  }

  // `frame` has its uncompressed length; fills in the rest.
  absl::Status Compress(std::span<const std::byte> input, std::span<std::byte> output,
                        CompressedFrame* frame) {
    frame->checksum = XXH3_64bits(input.data(), input.size());
    const size_t length =
        ZSTD_compress2(context_.get(), output.data(), output.size(), input.data(), input.size());
    if (ZSTD_isError(length)) {
      return absl::InternalError(fmt::format("zstd: {}", ZSTD_getErrorName(length)));
    }
    frame->bytes = output.first(length);
    hasher_.Update(frame->bytes);
    frame->digest = hasher_.Finish();
    return absl::OkStatus();
  }

 private:
  struct Free {
    void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  };
  std::unique_ptr<ZSTD_CCtx, Free> context_{ZSTD_createCCtx()};
  Hasher hasher_;
};

FramePipeline::FramePipeline(size_t slots, Sink sink) : sink_(std::move(sink)), slots_(slots) {
  for (Slot& slot : slots_) {
    slot.input.resize(kFrameSize);
    slot.output.resize(kMaxFrameLength);
  }
}

absl::StatusOr<std::unique_ptr<FramePipeline>> FramePipeline::Create(int level, int jobs,
                                                                     Sink sink) {
  // Two for each thread keep it busy; the others are for those that are done but wait for an older one,
  // and for the times when small files keep the thread that submits: they come in runs.
  const size_t slots = 2 * static_cast<size_t>(jobs) + 16;
  std::unique_ptr<FramePipeline> pipeline(new FramePipeline(slots, std::move(sink)));
  for (int i = 0; i < jobs; ++i) {
    ASSIGN_OR_RETURN(std::unique_ptr<Worker> worker, Worker::Create(level));
    pipeline->workers_.push_back(std::move(worker));
  }
  try {
    for (const auto& worker : pipeline->workers_) {
      pipeline->threads_.emplace_back(&FramePipeline::Work, pipeline.get(), std::ref(*worker));
    }
    pipeline->threads_.emplace_back(&FramePipeline::Deliver, pipeline.get());
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        fmt::format("start {} compression threads and one that writes: {}", jobs, error.what()));
  }
  return pipeline;
}

FramePipeline::~FramePipeline() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_available_.notify_all();
  work_done_.notify_one();
  for (std::thread& thread : threads_) thread.join();
}

void FramePipeline::Work(Worker& worker) {
  std::unique_lock lock(mutex_);
  while (true) {
    work_available_.wait(lock, [this] { return stop_ || taken_ < submitted_; });
    if (stop_) return;
    Slot& mine = slot(taken_++);
    lock.unlock();
    const auto input = std::span(mine.input).first(mine.frame.uncompressed_length);
    mine.status = worker.Compress(input, mine.output, &mine.frame);
    lock.lock();
    mine.done = true;
    work_done_.notify_one();
  }
}

absl::Status FramePipeline::Submit(uint32_t length) {
  Slot& next = slot(submitted_);
  next.frame.uncompressed_length = length;
  {
    std::lock_guard lock(mutex_);
    next.done = false;
    ++submitted_;
  }
  work_available_.notify_one();
  return WaitForRoom(slots_.size() - 1);
}

void FramePipeline::Deliver() {
  std::unique_lock lock(mutex_);
  while (true) {
    Slot& oldest = slot(delivered_);
    work_done_.wait(lock, [&] { return stop_ || (delivered_ < submitted_ && oldest.done); });
    if (stop_) return;
    lock.unlock();
    absl::Status status =
        oldest.status.ok() ? sink_(oldest.frame)
                           : Annotate(oldest.status, fmt::format("compress frame {}", delivered_));
    lock.lock();
    if (status.ok()) {
      ++delivered_;
    } else {
      error_ = std::move(status);
    }
    work_delivered_.notify_one();
    if (!error_.ok()) return;
  }
}

absl::Status FramePipeline::WaitForRoom(uint64_t limit) {
  std::unique_lock lock(mutex_);
  work_delivered_.wait(lock, [&] { return !error_.ok() || submitted_ - delivered_ <= limit; });
  return error_;
}

}  // namespace lamina::chunkstore
