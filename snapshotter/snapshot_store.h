// SPDX-License-Identifier: Apache-2.0
//
// What is known of snapshots: names, parents, kinds, labels. It is all in memory and in RocksDB; an
// operation is one transaction. Directories and mounts are not its business.
#ifndef LAMINA_SNAPSHOTTER_SNAPSHOT_STORE_H_
#define LAMINA_SNAPSHOTTER_SNAPSHOT_STORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/disk_usage.h"
#include "chunkstore/base/status.h"
#include "chunkstore/blob_tables.h"
#include "erofs/merge.h"

namespace lamina::snapshotter {

// containerd's words: what is prepared can be written to; it becomes a committed snapshot, which
// never changes and can be a parent. A view is of a committed one and cannot be written to.
enum class Kind { kView, kActive, kCommitted };

using Usage = DiskUsage;

// A converted layer that a snapshot is, instead of files in a directory of its own.
struct LazyLayer {
  chunkstore::LayerDescriptor layer;
  std::string image;  // that it is read from, as OpenImage takes it
  erofs::LayerMarks marks;
};

using Labels = std::map<std::string, std::string>;

struct Snapshot {
  std::string name;
  uint64_t id = 0;  // names its directory, and is not used twice
  std::string parent;
  Kind kind = Kind::kActive;
  int64_t created = 0;  // nanoseconds since 1970; Create and Commit set it
  int64_t updated = 0;
  Labels labels;
  Usage usage;                     // of a committed one
  std::optional<LazyLayer> layer;  // of a committed one
  // Of one with files of its own: layers between those and the parent, lowest first.
  std::vector<LazyLayer> layers_below;
};

// Thread-safe.
class SnapshotStore {
 public:
  // kUnavailable if another process has it open; kDataLoss if it is damaged.
  static absl::StatusOr<std::unique_ptr<SnapshotStore>> Open(const std::string& directory);
  virtual ~SnapshotStore() = default;

  // kNotFound if there is none of this name.
  virtual absl::StatusOr<Snapshot> Get(const std::string& name) const = 0;
  // The snapshot, its parent, the parent of that, down to the one that has none.
  virtual absl::StatusOr<std::vector<Snapshot>> Chain(const std::string& name) const = 0;
  // Those that have this parent; with an empty name those that have none.
  virtual std::vector<Snapshot> Children(const std::string& parent) const = 0;
  // All of them, by name.
  virtual std::vector<Snapshot> List() const = 0;

  // A number that was never given to a snapshot that is there.
  virtual uint64_t NewId() = 0;
  // Numbers up to this one are taken.
  virtual void ReserveIds(uint64_t last) = 0;

  // kAlreadyExists if the name is taken, kNotFound if the parent is not there, kInvalidArgument if it
  // is not committed. Returns the snapshot with its times.
  virtual absl::StatusOr<Snapshot> Create(Snapshot snapshot) = 0;
  // Makes an active snapshot a committed one of another name with these labels, on the disk before
  // it returns. kNotFound, kAlreadyExists (`name`), kFailedPrecondition if it is not active.
  virtual absl::StatusOr<Snapshot> Commit(const std::string& key, const std::string& name,
                                          const Labels& labels, const Usage& usage) = 0;
  // Replaces labels: all if there are no paths, else those that "labels.NAME" or "labels" name, by
  // what `labels` has of them. kInvalidArgument for other paths.
  virtual absl::StatusOr<Snapshot> Update(const std::string& name, const Labels& labels,
                                          const std::vector<std::string>& paths) = 0;
  // Returns what was removed. kNotFound; kFailedPrecondition if it is the parent of another one.
  virtual absl::StatusOr<Snapshot> Remove(const std::string& name) = 0;
};

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_SNAPSHOT_STORE_H_
