// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_SNAPSHOTTER_DISK_USAGE_H_
#define LAMINA_SNAPSHOTTER_DISK_USAGE_H_

#include <string>

#include "chunkstore/base/status.h"
#include "snapshotter/snapshot_store.h"

namespace lamina::snapshotter {

// What a directory and all below it take of the file system that it is on; files with several names
// count once. What goes while it is being read does not count.
absl::StatusOr<Usage> DiskUsage(const std::string& directory);

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_DISK_USAGE_H_
