// SPDX-License-Identifier: Apache-2.0
#include "tools/laminad/container_op.h"

#include <absl/strings/str_split.h>

#include "fs/engine/messages.h"
#include "fs/image/image.h"

namespace lamina::daemon {

using nlohmann::json;

absl::StatusOr<json> DescribeContainer(snapshotter::Snapshotter& snapshots,
                                       snapshotter::ContainerClient& containerd,
                                       const json& request) {
  ASSIGN_OR_RETURN(const std::string name_space, fs::StringField(request, "name_space"));
  ASSIGN_OR_RETURN(const std::string id, fs::StringField(request, "id"));
  ASSIGN_OR_RETURN(const snapshotter::ContainerInfo container, containerd.Get(name_space, id),
                   "container {}", id);
  ASSIGN_OR_RETURN(const snapshotter::WrittenSnapshot written,
                   snapshots.Written(name_space, container.snapshot_key),
                   "container {}, which is on the snapshotter {}", id, container.snapshotter);
  ASSIGN_OR_RETURN(const std::string image,
                   fs::PinReference("docker://" + container.image, container.image_digest),
                   "image of container {}", id);
  json layers = json::array();
  for (const chunkstore::LayerDescriptor& layer : written.layers) {
    layers.push_back(layer.digest.ToString());
  }
  json layer_images = json::array();
  for (const absl::string_view reference :
       absl::StrSplit(written.layer_images, ',', absl::SkipEmpty())) {
    layer_images.push_back(std::string(reference));
  }
  return json{{"image", image},
              {"layer_images", layer_images},
              {"upper", written.upper},
              {"layers", layers}};
}

}  // namespace lamina::daemon
