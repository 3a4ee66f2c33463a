// SPDX-License-Identifier: Apache-2.0
//
// Keeps the bytes of a frame where they are while someone reads them.
//
// An evicted frame is a hole of the data file, which reads as zeros. So that nobody ever gets those
// zeros, who reads and who evicts keep to one rule:
//
//   reader:   enter a section; look at the frame's bit; read only if it is set; leave.
//   evictor:  clear the bit; AwaitReaders(); punch the hole; only then let the frame be fetched
//             again.
//
// Why it is right: bits and counters are changed and looked at with sequential consistency, so
// there is one order of all these steps. A reader that finds the bit set has looked before the
// evictor cleared it (or after the frame was written anew, which is after the hole), so it has
// entered before as well, and AwaitReaders(), which comes after the clearing, waits until it has
// left. A reader that looks later finds the bit clear and reads nothing.
//
// A read lasts until the bytes are out of the file's pages: copied to memory, or into the kernel's
// reply. Pages in a pipe are still the file's pages, and punching a hole zeroes what it covers of a
// large folio in place (truncate_inode_partial_folio, Linux 5.17), so whoever splices must stay
// until the pipe has been emptied, and must not let the kernel keep the pages (SPLICE_F_MOVE).
// Nobody may map a data file.
#ifndef LAMINA_CHUNKSTORE_DATA_READERS_H_
#define LAMINA_CHUNKSTORE_DATA_READERS_H_

#include <absl/container/flat_hash_map.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

#include "chunkstore/base/digest.h"

namespace lamina::chunkstore {

// The readers of all data files of a store. Thread-safe. Entering and leaving are one atomic
// addition each, on a cache line that few processors share.
class DataReaders {
 public:
  // Inside a section for as long as it lives; any thread may end it. An empty one is inside none.
  class Section {
   public:
    Section() = default;
    Section(Section&& other) noexcept : count_(std::exchange(other.count_, nullptr)) {}
    Section& operator=(Section&& other) noexcept {
      if (this != &other) {
        Leave();
        count_ = std::exchange(other.count_, nullptr);
      }
      return *this;
    }
    ~Section() { Leave(); }
    explicit operator bool() const { return count_ != nullptr; }

   private:
    friend class DataReaders;
    explicit Section(std::atomic<uint64_t>* count) : count_(count) {}
    void Leave() {
      if (count_ != nullptr) count_->fetch_sub(1);
      count_ = nullptr;
    }

    std::atomic<uint64_t>* count_ = nullptr;
  };

  // A section must not wait for a fetch, nor for anything that may wait for an eviction.
  Section Enter();

  // Returns when every section that was entered before the call has been left, whatever is entered
  // meanwhile. Not to be called inside a section.
  void AwaitReaders();

  // For chunk copies, which read blobs whose bits they do not see: inside a section, a blob may be
  // read if this is true.
  bool MayCopyFrom(const Digest& blob) const;
  // An evictor says so before it calls AwaitReaders(), and when its holes are punched.
  void BeginEviction(const Digest& blob);
  void EndEviction(const Digest& blob);

 private:
  // Sections are counted on one side, and AwaitReaders() waits for each side in turn while new ones
  // are counted on the other: so it ends however many readers come. (One turn would do for those
  // that see the change of sides at once; a reader that is between looking and counting may still
  // count on the side that is waited for.)
  struct alignas(64) Slot {
    std::array<std::atomic<uint64_t>, 2> counts{};
  };
  static constexpr size_t kSlots = 32;

  std::array<Slot, kSlots> slots_;
  std::atomic<uint64_t> turn_{0};
  std::mutex await_mutex_;  // one turn after the other
  mutable std::mutex evicting_mutex_;
  absl::flat_hash_map<Digest, int> evicting_;  // and how many evict from it
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_DATA_READERS_H_
