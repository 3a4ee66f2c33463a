// SPDX-License-Identifier: Apache-2.0
//
// Converted layers, mounted once on a node for all snapshots that have them:
//
//   <directory>/L<hex>/   one layer, or several that are merged into one file system
//
// A chain of layers becomes as few mounts as are good: one for each layer, which other chains can
// share, or a single one if there are so many that looking through them all would take long, or if
// overlayfs would not show of them what it should (erofs/merge.h, LayerMarks).
#ifndef LAMINA_SNAPSHOTTER_LAYER_MOUNTS_H_
#define LAMINA_SNAPSHOTTER_LAYER_MOUNTS_H_

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "chunkstore/base/status.h"
#include "fs/engine/engine.h"
#include "snapshotter/snapshot_store.h"

namespace lamina::snapshotter {

// Layers that are mounted as one file system.
struct LayerGroup {
  std::vector<LazyLayer> layers;  // lowest first
  // One layer with its whiteouts, to be stacked on what lies below.
  bool keep_marks = false;
};

// How a run of layers, lowest first, is mounted: groups, lowest first. `is_base`: nothing lies below.
std::vector<LayerGroup> GroupLayers(std::vector<LazyLayer> layers, bool is_base);

// Thread-safe.
class LayerMounts {
 private:
  struct Entry;

 public:
  // What stays mounted at `directory` from before is taken over, and goes when nobody uses it for
  // `idle`. `engine` must outlive the object, and keeps what is mounted when it goes.
  LayerMounts(fs::Engine& engine, std::string directory, registry::Settings settings,
              std::chrono::milliseconds idle);
  ~LayerMounts();

  // Somebody's need of some groups. None of them is unmounted as long as it lives; it must not
  // outlive the LayerMounts.
  class Use {
   public:
    Use() = default;
    Use(Use&& other) noexcept : mounts_(other.mounts_), entries_(std::move(other.entries_)) {
      other.entries_.clear();
    }
    Use& operator=(Use&& other) noexcept {
      std::swap(mounts_, other.mounts_);
      std::swap(entries_, other.entries_);
      return *this;
    }
    ~Use() {
      if (!entries_.empty()) mounts_->Release(entries_);
    }

   private:
    friend class LayerMounts;
    LayerMounts* mounts_ = nullptr;
    std::vector<std::shared_ptr<Entry>> entries_;
  };

  // Mounts nothing yet.
  Use Reserve(const std::vector<LayerGroup>& groups);
  // Mounts what is not mounted. Returns the directories, in the order of the groups. May wait for the
  // layers' origin; the error names the layer.
  absl::StatusOr<std::vector<std::string>> Mount(const Use& use);

 private:
  void Release(const std::vector<std::shared_ptr<Entry>>& entries);
  absl::Status MountEntry(Entry& entry);
  void TakeOver();
  void UnmountIdle(const std::stop_token& stop);

  fs::Engine& engine_;
  const std::string directory_;
  const registry::Settings settings_;
  const std::chrono::milliseconds idle_;
  std::mutex mutex_;  // guards entries_ and how often each is used
  std::map<std::string, std::shared_ptr<Entry>> entries_;  // by path
  bool released_ = false;                                  // something, since the reaper looked
  std::condition_variable_any wake_;
  std::jthread reaper_;  // last: it uses the rest
};

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_LAYER_MOUNTS_H_
