// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_CHUNKSTORE_BASE_DISK_USAGE_H_
#define LAMINA_CHUNKSTORE_BASE_DISK_USAGE_H_

#include <cstdint>
#include <string>

#include "chunkstore/base/status.h"

namespace lamina {

struct DiskUsage {
  int64_t bytes = 0;
  int64_t inodes = 0;
};

// What a directory and all below it take of the file system that it is on; files with several names
// count once. What goes while it is being read does not count.
absl::StatusOr<DiskUsage> DiskUsageOf(const std::string& directory);

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_DISK_USAGE_H_
