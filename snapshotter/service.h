// SPDX-License-Identifier: Apache-2.0
//
// Serves a snapshotter to containerd (snapshots.proto).
#ifndef LAMINA_SNAPSHOTTER_SERVICE_H_
#define LAMINA_SNAPSHOTTER_SERVICE_H_

#include <memory>

#include "chunkstore/base/file.h"
#include "fs/control/grpc_server.h"
#include "snapshotter/snapshotter.h"

namespace lamina::snapshotter {

// Serves calls on `listener`, a listening unix socket: who may connect is decided by its owner.
absl::StatusOr<std::unique_ptr<fs::GrpcServer>> StartSnapshotService(
    std::shared_ptr<Snapshotter> snapshotter, UniqueFd listener);

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_SERVICE_H_
