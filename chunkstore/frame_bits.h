// SPDX-License-Identifier: Apache-2.0
//
// One bit for each frame of a blob, in memory.
#ifndef LAMINA_CHUNKSTORE_FRAME_BITS_H_
#define LAMINA_CHUNKSTORE_FRAME_BITS_H_

#include <atomic>
#include <cstdint>
#include <vector>

namespace lamina::chunkstore {

// Lock-free; any number of threads. What a thread did before Set() is seen by those whose Test()
// finds the bit set. All operations are sequentially consistent: data_readers.h relies on it.
class FrameBits {
 public:
  static constexpr uint32_t kBitsPerWord = 64;

  // All clear.
  explicit FrameBits(uint32_t size) : words_((size + uint64_t{kBitsPerWord} - 1) / kBitsPerWord) {}

  bool Test(uint32_t frame) const {
    return (words_[frame / kBitsPerWord].load() & Mask(frame)) != 0;
  }
  // Both return true if the bit was not as asked for before.
  bool Set(uint32_t frame) {
    return (words_[frame / kBitsPerWord].fetch_or(Mask(frame)) & Mask(frame)) == 0;
  }
  bool Clear(uint32_t frame) {
    return (words_[frame / kBitsPerWord].fetch_and(~Mask(frame)) & Mask(frame)) != 0;
  }

  // For storing them: frame n is bit n % 64 of word n / 64.
  std::vector<std::atomic<uint64_t>>& words() { return words_; }
  const std::vector<std::atomic<uint64_t>>& words() const { return words_; }

 private:
  static uint64_t Mask(uint32_t frame) { return uint64_t{1} << (frame % kBitsPerWord); }

  std::vector<std::atomic<uint64_t>> words_;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_FRAME_BITS_H_
