// SPDX-License-Identifier: Apache-2.0
//
// Serves an engine over gRPC (control.proto).
#ifndef LAMINA_FS_CONTROL_CONTROL_SERVER_H_
#define LAMINA_FS_CONTROL_CONTROL_SERVER_H_

#include <memory>

#include "chunkstore/base/file.h"
#include "fs/engine/engine.h"

namespace lamina::fs {

class ControlServer {
 public:
  // Accepts connections from `listener`, a listening unix socket: who may connect is decided by its
  // owner. Serves them from threads of its own. `engine` must outlive the object.
  static absl::StatusOr<std::unique_ptr<ControlServer>> Start(Engine& engine, UniqueFd listener);
  // Lets calls that run finish.
  virtual ~ControlServer() = default;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_CONTROL_CONTROL_SERVER_H_
