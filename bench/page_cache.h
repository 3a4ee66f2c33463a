// SPDX-License-Identifier: Apache-2.0
//
// Asks the kernel what of a file is in its page cache.
#ifndef LAMINA_BENCH_PAGE_CACHE_H_
#define LAMINA_BENCH_PAGE_CACHE_H_

#include <cstdint>

#include "chunkstore/base/status.h"

namespace lamina::bench {

// How many pages of the first `size` bytes are in the page cache. `fd` must be open for reading,
// and its file owned by the caller or writable: mincore(2) hides the truth from others.
absl::StatusOr<uint64_t> PagesInCache(int fd, uint64_t size);

}  // namespace lamina::bench

#endif  // LAMINA_BENCH_PAGE_CACHE_H_
