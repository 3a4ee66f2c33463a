// SPDX-License-Identifier: Apache-2.0
//
// Where inodes go in the inode area.
#ifndef LAMINA_EROFS_INODE_PLACER_H_
#define LAMINA_EROFS_INODE_PLACER_H_

#include <cstdint>
#include <utility>

#include "erofs/format.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// Gives out places in the order of calls. An inode that may not cross a block boundary, but would,
// goes to the next block and leaves a gap; the largest gap known is filled with later inodes.
class InodePlacer {
 public:
  // `unbroken`: how much of the `size` bytes has to lie in one block.
  uint64_t Place(uint64_t unbroken, uint64_t size) {
    size = AlignUp(size, kInodeSlotSize);
    if (size <= gap_size_) {
      gap_size_ -= size;
      return std::exchange(gap_, gap_ + size);
    }
    const uint64_t room = kBlockSize - end_ % kBlockSize;
    if (unbroken > room) {
      if (room > gap_size_) {
        gap_ = end_;
        gap_size_ = room;
      }
      end_ += room;
    }
    return std::exchange(end_, end_ + size);
  }

  uint64_t end() const { return end_; }

 private:
  // Slot 0 stays empty: readdir(3) skips entries with inode number 0.
  uint64_t end_ = kInodeSlotSize;
  uint64_t gap_ = 0;
  uint64_t gap_size_ = 0;
};

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_INODE_PLACER_H_
