// SPDX-License-Identifier: Apache-2.0
#include "bench/page_cache.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "chunkstore/base/file.h"

namespace lamina::bench {

absl::StatusOr<uint64_t> PagesInCache(int fd, uint64_t size) {
  if (size == 0) return 0;
  ASSIGN_OR_RETURN(const Mapping mapping, Mapping::OfFile(fd, size, /*writable=*/false));
  const auto page_size = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> present((size + page_size - 1) / page_size);
  void* const start = const_cast<std::byte*>(mapping.bytes().data());
  if (::mincore(start, size, present.data()) != 0) return ErrnoStatus(errno, "mincore");
  const auto in_cache = [](unsigned char flags) { return (flags & 1) != 0; };
  return static_cast<uint64_t>(std::count_if(present.begin(), present.end(), in_cache));
}

}  // namespace lamina::bench
