// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/snapshot_store.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <utility>

#include "chunkstore/base/digest.h"
#include "snapshotter/record.pb.h"

namespace lamina::snapshotter {
namespace {

// A handful of small records: the least memory that RocksDB works well with.
constexpr size_t kWriteBuffer = 1 << 20;
constexpr std::string_view kLabelPath = "labels.";

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

RecordKind ToRecord(Kind kind) {
  switch (kind) {
    case Kind::kView:
      return RECORD_KIND_VIEW;
    case Kind::kActive:
      return RECORD_KIND_ACTIVE;
    case Kind::kCommitted:
      return RECORD_KIND_COMMITTED;
  }
  return RECORD_KIND_UNKNOWN;
}

std::optional<Kind> FromRecord(RecordKind kind) {
  switch (kind) {
    case RECORD_KIND_VIEW:
      return Kind::kView;
    case RECORD_KIND_ACTIVE:
      return Kind::kActive;
    case RECORD_KIND_COMMITTED:
      return Kind::kCommitted;
    default:
      return std::nullopt;
  }
}

void FillRecord(const LazyLayer& from, LayerRecord& layer) {
  layer.set_digest(from.layer.digest.ToString());
  layer.set_size(from.layer.size);
  layer.set_section_table_offset(from.layer.section_table_offset);
  layer.set_section_table_digest(from.layer.section_table_digest.ToString());
  layer.set_image(from.image);
  layer.set_implied_root(from.marks.implied_root);
  layer.set_implied_directories(from.marks.implied_directories);
  layer.set_opaque_root(from.marks.opaque_root);
}

absl::StatusOr<LazyLayer> ParseLayerRecord(const LayerRecord& record) {
  LazyLayer layer{
      .image = record.image(),
      .marks = {record.implied_root(), record.implied_directories(), record.opaque_root()}};
  ASSIGN_OR_RETURN(layer.layer.digest, Digest::Parse(record.digest()));
  ASSIGN_OR_RETURN(layer.layer.section_table_digest, Digest::Parse(record.section_table_digest()));
  layer.layer.size = record.size();
  layer.layer.section_table_offset = record.section_table_offset();
  return layer;
}

std::string Serialize(const Snapshot& snapshot) {
  SnapshotRecord record;
  record.set_id(snapshot.id);
  record.set_parent(snapshot.parent);
  record.set_kind(ToRecord(snapshot.kind));
  record.set_created(snapshot.created);
  record.set_updated(snapshot.updated);
  record.mutable_labels()->insert(snapshot.labels.begin(), snapshot.labels.end());
  record.set_usage_bytes(snapshot.usage.bytes);
  record.set_usage_inodes(snapshot.usage.inodes);
  if (snapshot.layer) FillRecord(*snapshot.layer, *record.mutable_layer());
  for (const LazyLayer& layer : snapshot.layers_below) {
    FillRecord(layer, *record.add_layers_below());
  }
  return record.SerializeAsString();
}

absl::StatusOr<Snapshot> Parse(std::string name, const std::string& text) {
  SnapshotRecord record;
  if (!record.ParseFromString(text)) return absl::DataLossError("record is damaged");
  const std::optional<Kind> kind = FromRecord(record.kind());
  if (!kind) return absl::DataLossError("record has an unknown kind");
  Snapshot snapshot{.name = std::move(name),
                    .id = record.id(),
                    .parent = record.parent(),
                    .kind = *kind,
                    .created = record.created(),
                    .updated = record.updated(),
                    .labels = {record.labels().begin(), record.labels().end()},
                    .usage = {record.usage_bytes(), record.usage_inodes()}};
  if (record.has_layer()) {
    ASSIGN_OR_RETURN(snapshot.layer, ParseLayerRecord(record.layer()));
  }
  for (const LayerRecord& layer : record.layers_below()) {
    ASSIGN_OR_RETURN(LazyLayer parsed, ParseLayerRecord(layer));
    snapshot.layers_below.push_back(std::move(parsed));
  }
  return snapshot;
}

absl::Status NotFound(const std::string& name) {
  return absl::NotFoundError(fmt::format("snapshot {} does not exist", name));
}

class RocksSnapshotStore final : public SnapshotStore {
 public:
  explicit RocksSnapshotStore(std::string directory) : directory_(std::move(directory)) {}

  absl::Status Load();

  absl::StatusOr<Snapshot> Get(const std::string& name) const override {
    std::lock_guard lock(mutex_);
    const Snapshot* snapshot = Find(name);
    if (snapshot == nullptr) return NotFound(name);
    return *snapshot;
  }
  absl::StatusOr<std::vector<Snapshot>> Chain(const std::string& name) const override;
  std::vector<Snapshot> Children(const std::string& parent) const override;
  std::vector<Snapshot> List() const override;
  uint64_t NewId() override {
    std::lock_guard lock(mutex_);
    return ++last_id_;
  }
  void ReserveIds(uint64_t last) override {
    std::lock_guard lock(mutex_);
    last_id_ = std::max(last_id_, last);
  }
  absl::StatusOr<Snapshot> Create(Snapshot snapshot) override;
  absl::StatusOr<Snapshot> Commit(const std::string& key, const std::string& name,
                                  const Labels& labels, const Usage& usage) override;
  absl::StatusOr<Snapshot> Update(const std::string& name, const Labels& labels,
                                  const std::vector<std::string>& paths) override;
  absl::StatusOr<Snapshot> Remove(const std::string& name) override;

 private:
  // With mutex_ held.
  const Snapshot* Find(const std::string& name) const {
    const auto found = snapshots_.find(name);
    return found == snapshots_.end() ? nullptr : &found->second;
  }
  bool HasChildren(const std::string& name) const {
    const auto child = children_.lower_bound({name, ""});
    return child != children_.end() && child->first == name;
  }
  void Put(Snapshot snapshot) {
    children_.emplace(snapshot.parent, snapshot.name);
    std::string name = snapshot.name;
    snapshots_.insert_or_assign(std::move(name), std::move(snapshot));
  }
  void Erase(const Snapshot& snapshot) {
    children_.erase({snapshot.parent, snapshot.name});
    snapshots_.erase(snapshot.name);
  }
  absl::Status Write(rocksdb::WriteBatch& batch, bool sync);

  const std::string directory_;
  std::unique_ptr<rocksdb::DB> database_;
  mutable std::mutex mutex_;  // guards what follows, and keeps it and the database equal
  std::map<std::string, Snapshot> snapshots_;
  std::set<std::pair<std::string, std::string>> children_;  // parent, child
  uint64_t last_id_ = 0;
};

absl::Status ToStatus(const rocksdb::Status& status, const std::string& directory,
                      std::string_view action) {
  if (status.ok()) return absl::OkStatus();
  const std::string text =
      fmt::format("snapshots {}: {}: {}", directory, action, status.ToString());
  if (status.IsCorruption()) return absl::DataLossError(text);
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(text);
  return absl::UnavailableError(text);
}

absl::Status RocksSnapshotStore::Load() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.paranoid_checks = true;
  options.write_buffer_size = kWriteBuffer;
  options.max_background_jobs = 2;
  options.max_file_opening_threads = 1;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.max_log_file_size = 1 << 20;
  options.keep_log_file_num = 2;
  rocksdb::DB* database = nullptr;
  RETURN_IF_ERROR(ToStatus(rocksdb::DB::Open(options, directory_, &database), directory_, "open"));
  database_.reset(database);
  const std::unique_ptr<rocksdb::Iterator> iterator(database_->NewIterator(rocksdb::ReadOptions()));
  for (iterator->SeekToFirst(); iterator->Valid(); iterator->Next()) {
    ASSIGN_OR_RETURN(Snapshot snapshot,
                     Parse(iterator->key().ToString(), iterator->value().ToString()),
                     "snapshots {}: {}", directory_, iterator->key().ToString());
    last_id_ = std::max(last_id_, snapshot.id);
    Put(std::move(snapshot));
  }
  return ToStatus(iterator->status(), directory_, "read");
}

absl::StatusOr<std::vector<Snapshot>> RocksSnapshotStore::Chain(const std::string& name) const {
  std::vector<Snapshot> chain;
  std::lock_guard lock(mutex_);
  // A parent is there before its child, so there is no way round.
  for (const std::string* next = &name; !next->empty(); next = &chain.back().parent) {
    const Snapshot* snapshot = Find(*next);
    if (snapshot == nullptr) return NotFound(*next);
    chain.push_back(*snapshot);
  }
  return chain;
}

std::vector<Snapshot> RocksSnapshotStore::Children(const std::string& parent) const {
  std::vector<Snapshot> children;
  std::lock_guard lock(mutex_);
  for (auto child = children_.lower_bound({parent, ""});
       child != children_.end() && child->first == parent; ++child) {
    children.push_back(snapshots_.at(child->second));
  }
  return children;
}

std::vector<Snapshot> RocksSnapshotStore::List() const {
  std::vector<Snapshot> list;
  std::lock_guard lock(mutex_);
  list.reserve(snapshots_.size());
  for (const auto& [name, snapshot] : snapshots_) list.push_back(snapshot);
  return list;
}

// What is not synced may be lost by a crash of the machine. Then containerd has a container without
// its snapshot, which could not run any more either, or we have one that containerd does not know and
// removes. A committed snapshot is part of an image, and stays.
absl::Status RocksSnapshotStore::Write(rocksdb::WriteBatch& batch, bool sync) {
  rocksdb::WriteOptions options;
  options.sync = sync;
  return ToStatus(database_->Write(options, &batch), directory_, "write");
}

absl::StatusOr<Snapshot> RocksSnapshotStore::Create(Snapshot snapshot) {
  std::lock_guard lock(mutex_);
  if (Find(snapshot.name) != nullptr) {
    return absl::AlreadyExistsError(fmt::format("snapshot {} exists", snapshot.name));
  }
  if (!snapshot.parent.empty()) {
    const Snapshot* parent = Find(snapshot.parent);
    if (parent == nullptr) return Annotate(NotFound(snapshot.parent), "parent");
    if (parent->kind != Kind::kCommitted) {
      return absl::InvalidArgumentError(
          fmt::format("parent {} is not a committed snapshot", snapshot.parent));
    }
  }
  snapshot.created = snapshot.updated = Now();
  rocksdb::WriteBatch batch;
  batch.Put(snapshot.name, Serialize(snapshot));
  RETURN_IF_ERROR(Write(batch, /*sync=*/snapshot.kind == Kind::kCommitted));
  Put(snapshot);
  return snapshot;
}

absl::StatusOr<Snapshot> RocksSnapshotStore::Commit(const std::string& key, const std::string& name,
                                                    const Labels& labels, const Usage& usage) {
  std::lock_guard lock(mutex_);
  const Snapshot* active = Find(key);
  if (active == nullptr) return NotFound(key);
  if (Find(name) != nullptr) {
    return absl::AlreadyExistsError(fmt::format("snapshot {} exists", name));
  }
  if (active->kind != Kind::kActive) {
    return absl::FailedPreconditionError(fmt::format("snapshot {} is not active", key));
  }
  const Snapshot before = *active;
  Snapshot committed = before;
  committed.name = name;
  committed.kind = Kind::kCommitted;
  committed.created = committed.updated = Now();
  committed.labels = labels;
  committed.usage = usage;
  rocksdb::WriteBatch batch;
  batch.Delete(key);
  batch.Put(name, Serialize(committed));
  RETURN_IF_ERROR(Write(batch, /*sync=*/true));
  Erase(before);
  Put(committed);
  return committed;
}

absl::StatusOr<Snapshot> RocksSnapshotStore::Update(const std::string& name, const Labels& labels,
                                                    const std::vector<std::string>& paths) {
  std::lock_guard lock(mutex_);
  const Snapshot* found = Find(name);
  if (found == nullptr) return NotFound(name);
  Snapshot updated = *found;
  if (paths.empty()) updated.labels = labels;
  for (const std::string& path : paths) {
    if (path == "labels") {
      updated.labels = labels;
    } else if (path.starts_with(kLabelPath)) {
      const std::string label = path.substr(kLabelPath.size());
      const auto value = labels.find(label);
      // containerd's own stores keep no label that is empty.
      if (value == labels.end() || value->second.empty()) {
        updated.labels.erase(label);
      } else {
        updated.labels[label] = value->second;
      }
    } else {
      return absl::InvalidArgumentError(
          fmt::format("field '{}' of snapshot {} cannot be changed", path, name));
    }
  }
  updated.updated = Now();
  rocksdb::WriteBatch batch;
  batch.Put(name, Serialize(updated));
  RETURN_IF_ERROR(Write(batch, /*sync=*/false));
  snapshots_[name] = updated;
  return updated;
}

absl::StatusOr<Snapshot> RocksSnapshotStore::Remove(const std::string& name) {
  std::lock_guard lock(mutex_);
  const Snapshot* found = Find(name);
  if (found == nullptr) return NotFound(name);
  if (HasChildren(name)) {
    return absl::FailedPreconditionError(
        fmt::format("cannot remove snapshot {}: it is the parent of another one", name));
  }
  Snapshot removed = *found;
  rocksdb::WriteBatch batch;
  batch.Delete(name);
  RETURN_IF_ERROR(Write(batch, /*sync=*/false));
  Erase(removed);
  return removed;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotStore>> SnapshotStore::Open(const std::string& directory) {
  auto store = std::make_unique<RocksSnapshotStore>(directory);
  RETURN_IF_ERROR(store->Load());
  return store;
}

}  // namespace lamina::snapshotter
