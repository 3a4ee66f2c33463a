// SPDX-License-Identifier: Apache-2.0
//
// The sockets that laminad listens on, as its configuration says.
#ifndef LAMINA_TOOLS_LAMINAD_SOCKETS_H_
#define LAMINA_TOOLS_LAMINAD_SOCKETS_H_

#include <vector>

#include "tools/laminad/config.h"
#include "tools/laminad/supervisor.h"

namespace lamina::daemon {

inline constexpr const char* kControlName = "control";  // for lamina(1), in the state directory
inline constexpr const char* kApiName = "api";          // gRPC
inline constexpr const char* kSnapshotterName = "snapshotter";  // gRPC, for containerd
inline constexpr const char* kMetricsName = "metrics";

// kInvalidArgument if two of them have the same path.
absl::StatusOr<std::vector<ListeningSocket>> SocketsOf(const Config& config);
// Whether they could be opened, as far as that can be known without opening them. The state directory
// need not be there yet.
absl::Status CheckSockets(const Config& config);

}  // namespace lamina::daemon

#endif  // LAMINA_TOOLS_LAMINAD_SOCKETS_H_
