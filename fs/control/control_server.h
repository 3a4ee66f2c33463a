// SPDX-License-Identifier: Apache-2.0
//
// Serves an engine over gRPC (control.proto).
#ifndef LAMINA_FS_CONTROL_CONTROL_SERVER_H_
#define LAMINA_FS_CONTROL_CONTROL_SERVER_H_

#include <memory>

#include "chunkstore/base/file.h"
#include "fs/control/grpc_server.h"
#include "fs/engine/engine.h"

namespace lamina::fs {

// `engine` must outlive the server.
absl::StatusOr<std::unique_ptr<GrpcServer>> StartControlServer(Engine& engine, UniqueFd listener);

}  // namespace lamina::fs

#endif  // LAMINA_FS_CONTROL_CONTROL_SERVER_H_
