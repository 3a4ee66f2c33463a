// SPDX-License-Identifier: Apache-2.0
//
// What containerd's containers are made of, for commands: answers on the engine's control socket.
#ifndef LAMINA_TOOLS_LAMINAD_CONTAINER_OP_H_
#define LAMINA_TOOLS_LAMINAD_CONTAINER_OP_H_

#include <nlohmann/json.hpp>

#include "snapshotter/container_client.h"
#include "snapshotter/snapshotter.h"

namespace lamina::daemon {

// The request {"op": "container", "name_space": ..., "id": ...}. Gives the image, named by the digest
// that the container was made from, the directory with what was written, and the digests of the layers
// below: {"image", "layer_images": [...], "upper", "layers": [...]}.
absl::StatusOr<nlohmann::json> DescribeContainer(snapshotter::Snapshotter& snapshots,
                                                 snapshotter::ContainerClient& containerd,
                                                 const nlohmann::json& request);

}  // namespace lamina::daemon

#endif  // LAMINA_TOOLS_LAMINAD_CONTAINER_OP_H_
