// SPDX-License-Identifier: Apache-2.0
//
// Decides which frames of a blob to fetch before they are asked for.
#ifndef LAMINA_CHUNKSTORE_READAHEAD_H_
#define LAMINA_CHUNKSTORE_READAHEAD_H_

#include <array>
#include <cstdint>

namespace lamina::chunkstore {

// Follows a few sequential readers of one blob. A reader that has used three frames in a row gets
// frames ahead of it: half as many as it has used so far, kMaxWindow at the most, and the next lot
// when it reaches the first frame of the last one. So random reads fetch nothing in vain, and a
// reader that stops has cost less than it used. Not thread-safe.
class Readahead {
 public:
  static constexpr uint32_t kMaxWindow = 8;  // frames; two windows, 4 MiB, are ahead at most

  struct Range {
    uint32_t first = 0;
    uint32_t end = 0;
  };

  // A reader wants the frames from `first` to before `end`. Returns the frames to fetch in advance,
  // which may be none, or lie past the end of the blob. To keep it going, the reader's arrival at
  // the first frame of the range must be reported with a further call. `max_window` is for a cache
  // in which kMaxWindow frames would be evicted before they are used.
  Range Advance(uint32_t first, uint32_t end, uint32_t max_window = kMaxWindow);

 private:
  struct Stream {
    uint32_t start = 0;    // where it began
    uint32_t next = 0;     // frame behind the last one used; 0: no stream
    uint32_t trigger = 0;  // frame whose use asks for more
    uint32_t ahead = 0;    // frame behind the last one fetched in advance
    uint64_t used_at = 0;
  };
  static bool Continues(const Stream& stream, uint32_t first, uint32_t end);

  std::array<Stream, 8> streams_;
  uint64_t clock_ = 0;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_READAHEAD_H_
