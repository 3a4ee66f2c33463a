// SPDX-License-Identifier: Apache-2.0
//
// The file `present` of a blob: which of its frames are in the data file.
#ifndef LAMINA_CHUNKSTORE_PRESENT_MAP_H_
#define LAMINA_CHUNKSTORE_PRESENT_MAP_H_

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"
#include "chunkstore/frame_bits.h"

namespace lamina::chunkstore {

// The bits are held in memory and each change is written through with pwrite(2). A shared mapping
// would save that call, but on a full disk (copy-on-write file systems allocate on every change) it
// kills the process with SIGBUS. Thread-safe.
class PresentMap {
 public:
  // Without a file: all clear, and forgotten with the object.
  explicit PresentMap(uint32_t frames) : bits_(frames) {}
  // Reads the file at `path`, or makes it. A file of the wrong size is started over: its bits only
  // ever say what need not be fetched.
  static absl::StatusOr<std::unique_ptr<PresentMap>> Open(const std::string& path, uint32_t frames);

  bool Test(uint32_t frame) const { return bits_.Test(frame); }
  // Set is to be called after the frame's bytes are written, Clear before they go. A change that
  // cannot be written to the file is lost with the process. Both return true if they changed it.
  bool Set(uint32_t frame);
  bool Clear(uint32_t frame);
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  // Calls `visit` with each frame that is set, in ascending order.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (uint32_t i = 0; i < bits_.words().size(); ++i) {
      for (uint64_t word = bits_.words()[i].load(); word != 0; word &= word - 1) {
        visit(i * FrameBits::kBitsPerWord + static_cast<uint32_t>(std::countr_zero(word)));
      }
    }
  }

 private:
  PresentMap(UniqueFd fd, uint32_t frames) : fd_(std::move(fd)), bits_(frames) {}
  absl::Status Load(uint32_t frames);
  void WriteWord(uint32_t frame);

  const UniqueFd fd_;
  FrameBits bits_;
  std::atomic<uint64_t> count_{0};
  std::mutex write_mutex_;  // the word written last is the newest one
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_PRESENT_MAP_H_
