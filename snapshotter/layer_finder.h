// SPDX-License-Identifier: Apache-2.0
//
// Finds out which converted layer a snapshot is that containerd is about to unpack. containerd says
// its chain id, and annotations of its descriptor as labels; which image it belongs to, and from where
// that comes, is in labels only if the client puts it there (as CRI does). Else it is in the manifest,
// which containerd has fetched before.
#ifndef LAMINA_SNAPSHOTTER_LAYER_FINDER_H_
#define LAMINA_SNAPSHOTTER_LAYER_FINDER_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chunkstore/registry/settings.h"
#include "fs/engine/engine.h"
#include "snapshotter/snapshot_store.h"

namespace lamina::snapshotter {

struct LayerFinderOptions {
  std::string containerd;  // path of its socket
  registry::Settings registry;
  // containerd keeps an image's registry without its port: "HOST:PORT" of those that have one.
  std::vector<std::string> registries;
  // Look for converted images that are attached to what is being pulled.
  bool referrers = true;
  // Fetch what a start of a pulled image will read, while containerd is still busy with it.
  bool prefetch = true;
};

struct LayerQuery {
  std::string key;       // of the snapshot, as containerd makes them
  std::string chain_id;  // of the layer and those below
  size_t depth = 0;      // layers below
  Labels labels;
};

// Thread-safe.
class LayerFinder {
 public:
  // `engine` must outlive the object.
  static std::unique_ptr<LayerFinder> Create(const LayerFinderOptions& options, fs::Engine& engine);
  virtual ~LayerFinder() = default;

  // The layer, attached; nothing if it is an ordinary one, to be unpacked. An error if it is a
  // converted one, which cannot be unpacked, and it is not found out where it is, or something is
  // wrong with it.
  virtual absl::StatusOr<std::optional<LazyLayer>> Find(const LayerQuery& query) = 0;
};

// Whether the labels are of a converted layer: one that cannot be unpacked.
bool IsConverted(const Labels& labels);

// OCI image specification, "Layer ChainID": of the first `count` layers.
std::string ChainId(const std::vector<Digest>& diff_ids, size_t count);

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_LAYER_FINDER_H_
