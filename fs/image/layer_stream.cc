// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layer_stream.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "fs/image/decompress.h"

namespace lamina::fs {
namespace {

constexpr size_t kBuffers = 4;

using Buffer = std::vector<std::byte>;

// Full buffers on the way to the reader and empty ones on the way back. Their number is fixed,
// which bounds how far the producer gets ahead.
class BufferQueue {
 public:
  BufferQueue() {
    for (size_t i = 0; i < kBuffers; ++i) empty_.emplace_back(kIoSize);
  }

  // For the producer: an empty buffer; nothing once the reader has stopped.
  std::optional<Buffer> TakeEmpty() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stopped_ || !empty_.empty(); });
    if (stopped_) return std::nullopt;
    Buffer buffer = std::move(empty_.front());
    empty_.pop_front();
    return buffer;
  }
  void PutFull(Buffer buffer) {
    const std::lock_guard lock(mutex_);
    full_.push_back(std::move(buffer));
    changed_.notify_one();
  }
  void End(absl::Status status) {
    const std::lock_guard lock(mutex_);
    end_ = std::move(status);
    changed_.notify_one();
  }

  // For the reader: the next full buffer; an empty one at the end.
  absl::StatusOr<Buffer> TakeFull() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !full_.empty() || end_; });
    if (full_.empty()) {
      if (!end_->ok()) return *end_;
      return Buffer();
    }
    Buffer buffer = std::move(full_.front());
    full_.pop_front();
    return buffer;
  }
  void PutEmpty(Buffer buffer) {
    buffer.resize(kIoSize);
    const std::lock_guard lock(mutex_);
    empty_.push_back(std::move(buffer));
    changed_.notify_one();
  }
  void Stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;  // one producer, one reader: never both wait
  std::deque<Buffer> empty_;
  std::deque<Buffer> full_;
  std::optional<absl::Status> end_;
  bool stopped_ = false;
};

absl::Status CheckDigest(std::string_view what, const Digest& expected, const Digest& actual) {
  if (expected == actual) return absl::OkStatus();
  return absl::DataLossError(fmt::format("{} mismatch: {} was expected, the content has {}", what,
                                         expected.ToString(), actual.ToString()));
}

class ThreadedLayerStream : public LayerStream {
 public:
  ThreadedLayerStream(ByteRange file, const std::optional<Digest>& digest, const Digest& diff_id,
                      Compression compression)
      : file_(std::move(file)),
        expected_digest_(digest),
        diff_id_(diff_id),
        decompressor_(Decompressor::Create(compression)),
        thread_([this] { queue_.End(Produce()); }) {}

  ~ThreadedLayerStream() override {
    queue_.Stop();
    thread_.join();
  }

  absl::StatusOr<size_t> Read(std::span<std::byte> into) override {
    if (position_ == current_.size()) {
      if (!current_.empty()) queue_.PutEmpty(std::exchange(current_, {}));
      position_ = 0;
      ASSIGN_OR_RETURN(current_, queue_.TakeFull());
    }
    const size_t length = std::min(into.size(), current_.size() - position_);
    if (length != 0) std::memcpy(into.data(), current_.data() + position_, length);
    position_ += length;
    return length;
  }

  uint64_t source_bytes_read() const override { return source_bytes_read_; }
  Digest digest() const override { return digest_; }

 private:
  // The thread: returns at the end of the file, at an error, or when the reader stops.
  absl::Status Produce() {
    Hasher file_hasher;
    Hasher content_hasher;
    Buffer input(kIoSize);
    std::optional<Buffer> output = queue_.TakeEmpty();
    size_t filled = 0;
    for (uint64_t position = 0; position < file_.size;) {
      const size_t length = std::min<uint64_t>(input.size(), file_.size - position);
      RETURN_IF_ERROR(file_.Read(position, std::span(input).first(length)));
      file_hasher.Update(std::span(input).first(length));
      position += length;
      source_bytes_read_ = position;
      std::span<const std::byte> rest(input.data(), length);
      for (bool more = true; more;) {
        if (!output) return absl::CancelledError("stopped by the reader");
        const std::span<std::byte> room = std::span(*output).subspan(filled);
        ASSIGN_OR_RETURN(const size_t made, decompressor_->Decompress(rest, room));
        content_hasher.Update(room.first(made));
        filled += made;
        more = made == room.size() || !rest.empty();
        if (filled == output->size()) {
          queue_.PutFull(*std::exchange(output, std::nullopt));
          output = queue_.TakeEmpty();
          filled = 0;
        }
      }
    }
    RETURN_IF_ERROR(decompressor_->Finish());
    digest_ = file_hasher.Finish();
    if (expected_digest_) RETURN_IF_ERROR(CheckDigest("digest", *expected_digest_, digest_));
    RETURN_IF_ERROR(CheckDigest("diff_id", diff_id_, content_hasher.Finish()));
    if (output && filled != 0) {
      output->resize(filled);
      queue_.PutFull(std::move(*output));
    }
    return absl::OkStatus();
  }

  const ByteRange file_;
  const std::optional<Digest> expected_digest_;
  const Digest diff_id_;
  const std::unique_ptr<Decompressor> decompressor_;
  BufferQueue queue_;
  Digest digest_;  // written by the thread before the end
  std::atomic<uint64_t> source_bytes_read_{0};
  Buffer current_;
  size_t position_ = 0;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace

absl::StatusOr<std::unique_ptr<LayerStream>> LayerStream::Open(ByteRange file,
                                                               const std::optional<Digest>& digest,
                                                               const Digest& diff_id) {
  ASSIGN_OR_RETURN(const Compression compression, DetectCompression(file));
  return std::make_unique<ThreadedLayerStream>(std::move(file), digest, diff_id, compression);
}

absl::StatusOr<Digest> HashFile(const ByteRange& file) {
  Hasher hasher;
  std::vector<std::byte> buffer(kIoSize);
  for (uint64_t position = 0; position < file.size;) {
    const auto piece = std::span(buffer).first(std::min<uint64_t>(kIoSize, file.size - position));
    RETURN_IF_ERROR(file.Read(position, piece));
    hasher.Update(piece);
    position += piece.size();
  }
  return hasher.Finish();
}

}  // namespace lamina::fs
