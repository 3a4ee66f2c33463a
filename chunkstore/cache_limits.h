// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_CHUNKSTORE_CACHE_LIMITS_H_
#define LAMINA_CHUNKSTORE_CACHE_LIMITS_H_

#include <cstdint>
#include <limits>

namespace lamina::chunkstore {

// When a frame was last used, by a clock of the store's own (BlobStore::Tick).
using UseTime = uint32_t;

// How much a store may keep of its blobs' content, in bytes. Tables and metadata do not count.
struct CacheLimits {
  uint64_t max_bytes = std::numeric_limits<uint64_t>::max();  // of content
  uint64_t min_free = 0;  // what the file system must keep free for others
  // Nothing is evicted in the background before the first blob is attached.
  bool once_attached = false;

  bool bounded() const {
    return max_bytes != std::numeric_limits<uint64_t>::max() || min_free != 0;
  }
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_CACHE_LIMITS_H_
