// SPDX-License-Identifier: Apache-2.0
//
// How large an engine's cache may be, as people say it.
#ifndef LAMINA_FS_ENGINE_CACHE_OPTIONS_H_
#define LAMINA_FS_ENGINE_CACHE_OPTIONS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "chunkstore/base/status.h"
#include "chunkstore/cache_limits.h"

namespace lamina::fs {

// Bytes, or a share of the file system.
struct Amount {
  uint64_t bytes = 0;
  uint32_t percent = 0;  // of the file system's size, if not 0

  uint64_t Of(uint64_t file_system_bytes) const;
  bool operator==(const Amount&) const = default;
};

// "1000", "512K", "20G" (powers of 1024), "1.5T" or "30%".
absl::StatusOr<Amount> ParseAmount(std::string_view text);

struct CacheOptions {
  // Half of the disk for all images of a node, and a margin below which kubelet and others begin to
  // complain is left alone.
  Amount size{.percent = 50};
  Amount free{.percent = 5};
  // Content goes from the origin to readers through memory, and never to the disk: for origins that
  // are as fast as a disk. `size` and `free` are not used.
  bool none = false;
  // Limits are kept once an image is used: by an engine that may have been started to look only.
  bool once_used = false;
};

// The limits for a store in `directory`, which must exist.
absl::StatusOr<chunkstore::CacheLimits> LimitsFor(const CacheOptions& options,
                                                  const std::string& directory);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_CACHE_OPTIONS_H_
