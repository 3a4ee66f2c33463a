// SPDX-License-Identifier: Apache-2.0
//
// Asks containerd for the manifests and configurations of images that it has, or is pulling.
#ifndef LAMINA_SNAPSHOTTER_CONTENT_CLIENT_H_
#define LAMINA_SNAPSHOTTER_CONTENT_CLIENT_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"

namespace lamina::snapshotter {

struct ContentInfo {
  Digest digest;
  std::map<std::string, std::string> labels;
};

// Thread-safe. Nothing is connected before it is needed, and again after containerd was restarted.
class ContentClient {
 public:
  // `socket` is the path of containerd's.
  static std::unique_ptr<ContentClient> Create(const std::string& socket);
  virtual ~ContentClient() = default;

  // What matches one of the filters (filter.h has their language), in a name space of containerd's.
  // Digests of other kinds than ours are left out. kUnavailable if containerd does not answer.
  virtual absl::StatusOr<std::vector<ContentInfo>> List(
      const std::string& name_space, const std::vector<std::string>& filters) = 0;
  // A document, whose digest is checked. kNotFound; kResourceExhausted if it is larger than a document
  // may be (json.h).
  virtual absl::StatusOr<std::string> Read(const std::string& name_space, const Digest& digest) = 0;
};

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_CONTENT_CLIENT_H_
