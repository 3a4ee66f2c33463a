// SPDX-License-Identifier: Apache-2.0
//
// Serves a snapshotter to containerd (snapshots.proto).
#ifndef LAMINA_SNAPSHOTTER_SERVICE_H_
#define LAMINA_SNAPSHOTTER_SERVICE_H_

#include <memory>

#include "chunkstore/base/file.h"
#include "snapshotter/snapshotter.h"

namespace lamina::snapshotter {

class SnapshotService {
 public:
  // Accepts connections from `listener`, a listening unix socket: who may connect is decided by its
  // owner. Serves them from threads of its own.
  static absl::StatusOr<std::unique_ptr<SnapshotService>> Start(
      std::shared_ptr<Snapshotter> snapshotter, UniqueFd listener);
  // Lets calls that run finish.
  virtual ~SnapshotService() = default;
};

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_SERVICE_H_
