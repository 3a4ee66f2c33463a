// SPDX-License-Identifier: Apache-2.0
//
// An engine's numbers for Prometheus, in its text format, version 0.0.4. The names are listed in
// docs/laminad.md.
#ifndef LAMINA_FS_CONTROL_METRICS_H_
#define LAMINA_FS_CONTROL_METRICS_H_

#include <memory>
#include <string>

#include "chunkstore/base/file.h"
#include "fs/engine/engine.h"

namespace lamina::fs {

// All metrics of `engine`, read now.
std::string MetricsText(Engine& engine);

class MetricsServer {
 public:
  // Answers HTTP requests for /metrics on `listener`, a listening stream socket, from a thread of
  // its own. `engine` must outlive the object.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(Engine& engine, UniqueFd listener);
  virtual ~MetricsServer() = default;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_CONTROL_METRICS_H_
