// SPDX-License-Identifier: Apache-2.0
//
// Asks containerd what a container is made of.
#ifndef LAMINA_SNAPSHOTTER_CONTAINER_CLIENT_H_
#define LAMINA_SNAPSHOTTER_CONTAINER_CLIENT_H_

#include <memory>
#include <string>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"

namespace lamina::snapshotter {

struct ContainerInfo {
  std::string snapshotter;
  std::string snapshot_key;  // without the name space
  std::string image;         // its name in containerd: "registry.example:5000/app:latest"
  Digest image_digest;       // of its manifest, or of an index
};

// Thread-safe. Nothing is connected before it is needed.
class ContainerClient {
 public:
  // `socket` is the path of containerd's.
  static std::unique_ptr<ContainerClient> Create(const std::string& socket);
  virtual ~ContainerClient() = default;

  // kNotFound if the name space has no such container, or its image is gone; kUnavailable if
  // containerd does not answer.
  virtual absl::StatusOr<ContainerInfo> Get(const std::string& name_space,
                                            const std::string& id) = 0;
};

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_CONTAINER_CLIENT_H_
