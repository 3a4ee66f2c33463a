// SPDX-License-Identifier: Apache-2.0
//
// Compresses frames on several threads, and gives them back in the order they came on one more.
#ifndef LAMINA_CHUNKSTORE_FRAME_PIPELINE_H_
#define LAMINA_CHUNKSTORE_FRAME_PIPELINE_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"

namespace lamina::chunkstore {

struct CompressedFrame {
  std::span<const std::byte> bytes;  // one zstd frame
  Digest digest;                     // of `bytes`
  uint32_t uncompressed_length = 0;
  uint64_t checksum = 0;  // XXH3-64 of the uncompressed bytes
};

// Used by one thread. Holds a fixed number of frames, whatever is submitted: Submit waits when all
// of them are in work.
class FramePipeline {
 public:
  // Takes the frames in order, on a thread of the pipeline. The frame's bytes are valid until it
  // returns. After an error it is not called again; some later Submit, or Flush, returns the error.
  // What it wrote may be read by whoever called Flush.
  using Sink = std::function<absl::Status(const CompressedFrame&)>;

  // `level` is one that zstd knows, `jobs` the number of threads, at least 1.
  static absl::StatusOr<std::unique_ptr<FramePipeline>> Create(int level, int jobs, Sink sink);
  // Frames the sink has not seen by now are dropped.
  ~FramePipeline();
  FramePipeline(const FramePipeline&) = delete;
  FramePipeline& operator=(const FramePipeline&) = delete;

  // Where to build the next frame: kFrameSize bytes of undefined content, until Submit.
  std::span<std::byte> buffer() { return slot(submitted_).input; }
  // The first `length` bytes of buffer() are a frame. After an error nothing more may be submitted.
  absl::Status Submit(uint32_t length);
  // Returns when the sink has all frames.
  absl::Status Flush() { return WaitForRoom(0); }

 private:
  // A frame on its way. Owned by the submitting thread until it is submitted and again once it is
  // delivered; in between by a worker, and by the delivering thread once it is done.
  struct Slot {
    std::vector<std::byte> input;
    std::vector<std::byte> output;
    CompressedFrame frame;
    absl::Status status;
    bool done = false;  // guarded by mutex_
  };
  class Worker;

  FramePipeline(size_t slots, Sink sink);
  Slot& slot(uint64_t number) { return slots_[number % slots_.size()]; }
  void Work(Worker& worker);
  void Deliver();
  // Waits until at most `limit` frames are not delivered.
  absl::Status WaitForRoom(uint64_t limit);

  const Sink sink_;
  std::vector<Slot> slots_;  // a ring: frame n is in slots_[n % size]
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable work_done_;
  std::condition_variable work_delivered_;
  // Numbers of frames so far, guarded by mutex_. delivered_ <= taken_ <= submitted_ < delivered_ +
  // slots_.size() between calls: one slot is always free to be filled.
  // Written by the submitting thread only, which reads it without the lock.
  uint64_t submitted_ = 0;
  uint64_t taken_ = 0;
  uint64_t delivered_ = 0;
  absl::Status error_;  // the first one: nothing is delivered after it
  bool stop_ = false;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_FRAME_PIPELINE_H_
