// SPDX-License-Identifier: Apache-2.0
//
// Snapshots as containerd means them (its documentation of snapshotters): what is prepared is written
// to, committed, and prepared on again; a chain of committed snapshots is an image's file system. Each
// is a directory, stacked by overlayfs as containerd's own snapshotter does, or a converted layer,
// which is mounted from wherever it is and takes no space here.
//
//   <state>/snapshots/db/         what is known of snapshots (snapshot_store.h)
//   <state>/snapshots/<id>/fs     their files: overlayfs' upper directory of one that is active
//   <state>/snapshots/<id>/work   overlayfs' work directory of one that is active
//   <state>/snapshots/L<hex>/     converted layers (layer_mounts.h)
//   <state>/snapshots/removed-*   on their way out
#ifndef LAMINA_SNAPSHOTTER_SNAPSHOTTER_H_
#define LAMINA_SNAPSHOTTER_SNAPSHOTTER_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chunkstore/base/status.h"
#include "chunkstore/registry/settings.h"
#include "fs/engine/engine.h"
#include "snapshotter/layer_finder.h"
#include "snapshotter/snapshot_store.h"

namespace lamina::snapshotter {

// Says which layer a snapshot is to become (containerd, snapshots/snapshotter.go).
inline constexpr char kReferenceLabel[] = "containerd.io/snapshot.ref";

// For mount(2), which the caller does: type, source, and options as in fstab(5).
struct MountSpec {
  std::string type;
  std::string source;
  std::vector<std::string> options;
};

// What an image of an active snapshot is made of.
struct WrittenSnapshot {
  std::string upper;                                // directory with what was written
  std::vector<chunkstore::LayerDescriptor> layers;  // below it, lowest first
  std::string layer_images;  // the label "containerd.io/snapshot/lamina.layers"
};

struct SnapshotterOptions {
  std::string state;            // of the engine
  registry::Settings registry;  // for layers in registries
  // References in the label "containerd.io/snapshot/lamina.layers" must begin with one of these.
  std::vector<std::string> layer_images;
  // Layers that no snapshot needs are unmounted after so long.
  std::chrono::milliseconds idle{60'000};
};

// Thread-safe. Names are of any characters; labels are the caller's.
class Snapshotter {
 public:
  // `engine` must outlive the object. Without a finder no layer is a converted one. kInvalidArgument for
  // a state directory with ',', ':' or '\\' in its path: overlayfs' options cannot have it.
  static absl::StatusOr<std::unique_ptr<Snapshotter>> Open(const SnapshotterOptions& options,
                                                           fs::Engine& engine,
                                                           std::unique_ptr<LayerFinder> finder);
  // Snapshots and mounts stay.
  virtual ~Snapshotter() = default;

  // A snapshot of kind kActive or kView, on a committed one or, if `parent` is empty, on nothing.
  // Returns how to mount it. kAlreadyExists if the key is taken, kNotFound if the parent is not
  // there, kInvalidArgument if it is not committed, kPermissionDenied for an image that may
  // not be put on top; what fetching a converted layer gives.
  // With the label "containerd.io/snapshot.ref" it is to become the layer with that chain id. If that
  // is a converted one, a committed snapshot with this label is there after the call, which fails with
  // kAlreadyExists: containerd takes that snapshot, which it finds with ListTaken, and does not fetch the
  // layer. Name spaces share a snapshot only if the same layer was found for each of them: what one of
  // them has for a chain id is not what others get.
  // The label "containerd.io/snapshot/lamina.layers" puts converted images on top of the parent:
  // references as OpenImage takes them, lowest first, with commas between them. They stay what they
  // were for as long as the snapshot lives.
  virtual absl::StatusOr<std::vector<MountSpec>> Create(Kind kind, const std::string& key,
                                                        const std::string& parent,
                                                        const Labels& labels) = 0;
  // How to mount one that is there. kFailedPrecondition if it is committed.
  virtual absl::StatusOr<std::vector<MountSpec>> Mounts(const std::string& key) = 0;
  // The rest is as SnapshotStore has it.
  virtual absl::Status Commit(const std::string& name, const std::string& key,
                              const Labels& labels) = 0;
  virtual absl::Status Remove(const std::string& key) = 0;
  virtual absl::StatusOr<Snapshot> Stat(const std::string& key) = 0;
  virtual absl::StatusOr<Snapshot> Update(const std::string& name, const Labels& labels,
                                          const std::vector<std::string>& paths) = 0;
  virtual std::vector<Snapshot> List() = 0;
  // Those that match of what Create has answered kAlreadyExists for: for each parent and chain id the
  // last one. To be called once after each such answer: until then, or for some seconds, Create holds
  // back another one for the same parent and chain id. What was answered before a restart is forgotten.
  virtual std::vector<Snapshot> ListTaken(const std::function<bool(const Snapshot&)>& matches) = 0;
  // What its own files take on the disk: not the parents', and nothing for a converted layer, whose
  // content is in the cache.
  virtual absl::StatusOr<Usage> GetUsage(const std::string& key) = 0;
  // The active snapshot that containerd calls `key` in a name space. kFailedPrecondition if some of
  // what is below it is not a converted layer.
  virtual absl::StatusOr<WrittenSnapshot> Written(const std::string& name_space,
                                                  const std::string& key) = 0;
  // Returns when removed snapshots take no space any more.
  virtual void Cleanup() = 0;
};

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_SNAPSHOTTER_H_
