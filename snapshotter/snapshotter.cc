// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/snapshotter.h"

#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "chunkstore/base/disk_usage.h"
#include "fs/mount/overlay.h"
#include "snapshotter/layer_mounts.h"
#include "snapshotter/remover.h"

namespace lamina::snapshotter {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kRemovedPrefix = "removed-";
// containerd looks for a snapshot that it was told is there at once, or its process has ended.
constexpr std::chrono::seconds kLooksWithin{10};
// Converted images to put on top of the parent, lowest first, with commas between them. containerd
// passes labels on that begin like this.
constexpr char kLayersLabel[] = "containerd.io/snapshot/lamina.layers";

absl::Status MakeDirectory(const std::string& path, mode_t mode) {
  if (::mkdir(path.c_str(), mode) != 0) return ErrnoStatus(errno, "create directory " + path);
  return absl::OkStatus();
}

// An image, or what one begins with, without "." and ".." in the path of a layout ("oci:DIR[:TAG]"), so
// that it begins with where it is.
std::string Normalized(std::string_view reference) {
  constexpr std::string_view kLayout = "oci:";
  if (!reference.starts_with(kLayout)) return std::string(reference);
  const std::string_view rest = reference.substr(kLayout.size());
  const std::string_view path = rest.substr(0, rest.find(':'));
  return fmt::format("{}{}{}", kLayout, std::filesystem::path(path).lexically_normal().string(),
                     rest.substr(path.size()));
}

// Directories that a layer only implies have the attributes of those below. They get them when layers are
// merged, which those that were unpacked cannot be.
absl::Status CheckStacks(const erofs::LayerMarks& marks, const std::vector<Snapshot>& chain) {
  const auto is_unpacked = [](const Snapshot& snapshot) { return !snapshot.layer; };
  if (!marks.implied_directories || std::ranges::none_of(chain, is_unpacked)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      "the converted layer says nothing of the attributes of some directories, and cannot take "
      "them "
      "from the layers below: those were unpacked, for an image that is not converted");
}

// How the parents of a snapshot are mounted, uppermost first: directories of snapshots, and groups of
// converted layers.
struct Lower {
  uint64_t id = 0;            // of a snapshot; 0 if it is a group
  bool implied_root = false;  // it says nothing of the root directory's attributes
};
struct Plan {
  std::vector<Lower> lowers;
  std::vector<LayerGroup> groups;  // in the order of `lowers`
};

// A directory of a snapshot, or a converted layer.
struct Part {
  uint64_t id = 0;
  const LazyLayer* layer = nullptr;
};

// What lies below the files of a snapshot, uppermost first: of itself, and of its parents.
std::vector<Part> PartsBelow(const Snapshot& snapshot, std::span<const Snapshot> parents) {
  std::vector<Part> parts;
  const auto add_layers = [&parts](const Snapshot& of) {
    for (auto layer = of.layers_below.rbegin(); layer != of.layers_below.rend(); ++layer) {
      parts.push_back({.layer = &*layer});
    }
  };
  add_layers(snapshot);
  for (const Snapshot& parent : parents) {
    if (parent.layer) {
      parts.push_back({.layer = &*parent.layer});
    } else {
      parts.push_back({.id = parent.id});
      add_layers(parent);
    }
  }
  return parts;
}

Plan PlanOf(const Snapshot& snapshot, std::span<const Snapshot> parents) {
  std::vector<Part> parts = PartsBelow(snapshot, parents);
  // overlayfs refuses a directory that is there twice (ELOOP), and of a layer that an image has several
  // times only the uppermost shows.
  std::set<Digest> above;
  std::erase_if(parts, [&](const Part& part) {
    return part.layer != nullptr && !above.insert(part.layer->layer.Key()).second;
  });
  Plan plan;
  for (size_t i = 0; i < parts.size();) {
    if (parts[i].layer == nullptr) {
      plan.lowers.push_back({.id = parts[i++].id});
      continue;
    }
    std::vector<LazyLayer> layers;
    while (i < parts.size() && parts[i].layer != nullptr) layers.push_back(*parts[i++].layer);
    // What is below one that hides all of it is not stacked.
    const auto opaque = std::ranges::find_if(
        layers, [](const LazyLayer& layer) { return layer.marks.opaque_root; });
    if (i < parts.size() && opaque != layers.end()) {
      layers.erase(opaque + 1, layers.end());
      i = parts.size();
    }
    std::ranges::reverse(layers);
    std::vector<LayerGroup> groups = GroupLayers(std::move(layers), /*is_base=*/i == parts.size());
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
      const bool implied = group->keep_marks && group->layers[0].marks.implied_root;
      plan.lowers.push_back({.implied_root = implied});
      plan.groups.push_back(std::move(*group));
    }
  }
  return plan;
}

class SnapshotterImpl final : public Snapshotter {
 public:
  SnapshotterImpl(const SnapshotterOptions& options, std::vector<std::string> overlay_options,
                  fs::Engine& engine, std::unique_ptr<SnapshotStore> store,
                  std::unique_ptr<LayerFinder> finder)
      : directory_(options.state + "/snapshots"),
        overlay_options_(std::move(overlay_options)),
        store_(std::move(store)),
        finder_(std::move(finder)),
        engine_(engine),
        registry_(options.registry),
        mounts_(engine, directory_, options.registry, options.idle) {
    std::ranges::transform(options.layer_images, std::back_inserter(layer_images_), Normalized);
  }

  // Directories that no snapshot has, and layers that snapshots need.
  absl::Status Restore();

  absl::StatusOr<std::vector<MountSpec>> Create(Kind kind, const std::string& key,
                                                const std::string& parent,
                                                const Labels& labels) override;
  absl::StatusOr<std::vector<MountSpec>> Mounts(const std::string& key) override;
  absl::Status Commit(const std::string& name, const std::string& key,
                      const Labels& labels) override;
  absl::Status Remove(const std::string& key) override;
  absl::StatusOr<Snapshot> Stat(const std::string& key) override { return store_->Get(key); }
  absl::StatusOr<Snapshot> Update(const std::string& name, const Labels& labels,
                                  const std::vector<std::string>& paths) override {
    return store_->Update(name, labels, paths);
  }
  std::vector<Snapshot> List() override { return store_->List(); }
  std::vector<Snapshot> ListTaken(const std::function<bool(const Snapshot&)>& matches) override;
  absl::StatusOr<Usage> GetUsage(const std::string& key) override;
  absl::StatusOr<WrittenSnapshot> Written(const std::string& name_space,
                                          const std::string& key) override;
  void Cleanup() override { remover_.Wait(); }

 private:
  // What containerd was told is there, and has not looked for yet.
  struct Taken {
    std::string name;
    int unseen = 0;
    Clock::time_point until;
  };
  // Directories of mounted lowers, uppermost first.
  struct Mounted {
    LayerMounts::Use use;
    std::vector<std::string> paths;
    std::string root;        // whose attributes the merged root has
    bool shows_root = true;  // the uppermost one has them
  };

  std::string PathOf(uint64_t id) const { return fmt::format("{}/{}", directory_, id); }
  std::string FilesOf(uint64_t id) const { return PathOf(id) + "/fs"; }
  absl::Status TakeConvertedLayer(const std::string& key, const std::string& parent,
                                  const std::vector<Snapshot>& chain, const Labels& labels);
  void Take(const std::string& parent, const std::string& reference, const std::string& name);
  absl::StatusOr<std::vector<LazyLayer>> FindLayers(const std::string& references,
                                                    const std::vector<Snapshot>& chain);
  absl::StatusOr<Mounted> MountLowers(const Plan& plan);
  absl::Status MakeDirectories(const Snapshot& snapshot, const Mounted& mounted) const;
  std::vector<MountSpec> SpecOf(const Snapshot& snapshot, const Mounted& mounted) const;
  void Keep(uint64_t id, LayerMounts::Use use);
  void Drop(uint64_t id);

  const std::string directory_;
  const std::vector<std::string> overlay_options_;
  const std::unique_ptr<SnapshotStore> store_;
  const std::unique_ptr<LayerFinder> finder_;  // may be null
  fs::Engine& engine_;
  const registry::Settings registry_;
  std::vector<std::string> layer_images_;  // normalized
  LayerMounts mounts_;
  Remover remover_;
  std::mutex mutex_;
  std::map<uint64_t, LayerMounts::Use> uses_;                   // of snapshots that can be mounted
  std::map<std::pair<std::string, std::string>, Taken> taken_;  // by parent and chain id
  std::condition_variable seen_;
};

absl::Status SnapshotterImpl::Restore() {
  std::set<std::string> known;
  for (const Snapshot& snapshot : store_->List()) {
    known.insert(std::to_string(snapshot.id));
    if (snapshot.kind == Kind::kCommitted || snapshot.parent.empty()) continue;
    ASSIGN_OR_RETURN(const std::vector<Snapshot> chain, store_->Chain(snapshot.parent),
                     "snapshot {}", snapshot.name);
    Keep(snapshot.id, mounts_.Reserve(PlanOf(snapshot, chain).groups));
  }
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory_, error)) {
    const std::string name = entry.path().filename();
    uint64_t id = 0;
    const auto [end, failure] = std::from_chars(name.data(), name.data() + name.size(), id);
    const bool is_id = failure == std::errc() && end == name.data() + name.size();
    if (is_id) store_->ReserveIds(id);
    if (known.contains(name) || !(is_id || name.starts_with(kRemovedPrefix))) continue;
    remover_.Remove(entry.path());
  }
  return error ? ErrnoStatus(error.value(), "read " + directory_) : absl::OkStatus();
}

absl::StatusOr<SnapshotterImpl::Mounted> SnapshotterImpl::MountLowers(const Plan& plan) {
  Mounted mounted{.use = mounts_.Reserve(plan.groups)};
  ASSIGN_OR_RETURN(const std::vector<std::string> groups, mounts_.Mount(mounted.use));
  auto group = groups.begin();
  bool has_root = false;
  for (const Lower& lower : plan.lowers) {
    mounted.paths.push_back(lower.id != 0 ? FilesOf(lower.id) : *group++);
    if (has_root) continue;
    mounted.root = mounted.paths.back();
    has_root = !lower.implied_root;
  }
  mounted.shows_root = mounted.paths.empty() || mounted.root == mounted.paths.front();
  return mounted;
}

absl::Status SnapshotterImpl::MakeDirectories(const Snapshot& snapshot,
                                              const Mounted& mounted) const {
  RETURN_IF_ERROR(MakeDirectory(PathOf(snapshot.id), 0700));
  const std::string files = FilesOf(snapshot.id);
  RETURN_IF_ERROR(MakeDirectory(files, 0755));
  if (::chmod(files.c_str(), 0755) != 0) return ErrnoStatus(errno, "set the mode of " + files);
  if (!mounted.paths.empty()) RETURN_IF_ERROR(fs::CopyDirectoryAttributes(mounted.root, files));
  if (snapshot.kind != Kind::kActive) return absl::OkStatus();
  return MakeDirectory(PathOf(snapshot.id) + "/work", 0711);
}

std::vector<MountSpec> SnapshotterImpl::SpecOf(const Snapshot& snapshot,
                                               const Mounted& mounted) const {
  const bool writable = snapshot.kind == Kind::kActive;
  const std::vector<std::string>& lowers = mounted.paths;
  // overlayfs is for two directories or more.
  if (lowers.empty()) {
    return {{"bind", FilesOf(snapshot.id), {writable ? "rw" : "ro", "rbind"}}};
  }
  if (!writable && lowers.size() == 1) return {{"bind", lowers[0], {"ro", "rbind"}}};
  std::vector<std::string> options = overlay_options_;
  std::string lower = "lowerdir=";
  if (writable) {
    options.push_back(fmt::format("workdir={}/work", PathOf(snapshot.id)));
    options.push_back("upperdir=" + FilesOf(snapshot.id));
  } else if (!mounted.shows_root) {
    lower += FilesOf(snapshot.id) + ":";  // empty, with the right attributes
  }
  options.push_back(lower + absl::StrJoin(lowers, ":"));
  return {{"overlay", "overlay", std::move(options)}};
}

void SnapshotterImpl::Keep(uint64_t id, LayerMounts::Use use) {
  std::lock_guard lock(mutex_);
  uses_[id] = std::move(use);
}

absl::StatusOr<std::vector<MountSpec>> SnapshotterImpl::Create(Kind kind, const std::string& key,
                                                               const std::string& parent,
                                                               const Labels& labels) {
  if (key.empty()) return absl::InvalidArgumentError("a snapshot needs a key");
  if (store_->Get(key).ok()) {
    return absl::AlreadyExistsError(fmt::format("snapshot {} exists", key));
  }
  std::vector<Snapshot> chain;
  if (!parent.empty()) {
    ASSIGN_OR_RETURN(chain, store_->Chain(parent), "parent");
    if (chain[0].kind != Kind::kCommitted) {
      return absl::InvalidArgumentError(
          fmt::format("parent {} is not a committed snapshot", parent));
    }
  }
  if (kind == Kind::kActive && finder_ != nullptr && labels.contains(kReferenceLabel)) {
    RETURN_IF_ERROR(TakeConvertedLayer(key, parent, chain, labels));
  }
  Snapshot snapshot{
      .name = key, .id = store_->NewId(), .parent = parent, .kind = kind, .labels = labels};
  if (const auto label = labels.find(kLayersLabel); label != labels.end() && !chain.empty()) {
    ASSIGN_OR_RETURN(snapshot.layers_below, FindLayers(label->second, chain), "label {}",
                     kLayersLabel);
  }
  ASSIGN_OR_RETURN(Mounted mounted, MountLowers(PlanOf(snapshot, chain)), "snapshot {}", key);
  std::vector<MountSpec> spec = SpecOf(snapshot, mounted);
  // The record comes last: a directory without one is removed at the next start.
  absl::Status status = MakeDirectories(snapshot, mounted);
  Keep(snapshot.id, std::move(mounted.use));
  if (status.ok()) status = store_->Create(snapshot).status();
  if (!status.ok()) {
    Drop(snapshot.id);
    return status;
  }
  return spec;
}

// Those of the images that the chain has already are left out, as OpenImages does.
absl::StatusOr<std::vector<LazyLayer>> SnapshotterImpl::FindLayers(
    const std::string& references, const std::vector<Snapshot>& chain) {
  std::set<Digest> there;
  for (const Snapshot& snapshot : chain) {
    if (snapshot.layer) there.insert(snapshot.layer->layer.Key());
    for (const LazyLayer& layer : snapshot.layers_below) there.insert(layer.layer.Key());
  }
  std::vector<LazyLayer> found;
  for (const absl::string_view text : absl::StrSplit(references, ',', absl::SkipEmpty())) {
    const std::string reference = Normalized({text.data(), text.size()});
    const auto begins = [&](const std::string& prefix) { return reference.starts_with(prefix); };
    // Or whoever may set a label could have any file of the node opened that looks like an image.
    if (std::ranges::none_of(layer_images_, begins)) {
      return absl::PermissionDeniedError(fmt::format(
          "laminad's configuration ([snapshotter] layer-images) does not allow image {}",
          reference));
    }
    ASSIGN_OR_RETURN(const fs::Image image, engine_.OpenImage(reference, registry_));
    const std::vector<absl::StatusOr<fs::AttachedLayer>> attached =
        engine_.AttachLayers(image, /*on_others=*/true);
    const std::set<Digest> below = there;
    for (size_t i = 0; i < attached.size(); ++i) {
      RETURN_IF_ERROR(attached[i].status(), "{}", image.reference);
      if (below.contains(image.layers[i].Key())) continue;
      RETURN_IF_ERROR(CheckStacks(attached[i]->marks, chain), "{}", image.reference);
      there.insert(image.layers[i].Key());
      found.push_back(
          {.layer = image.layers[i], .image = image.reference, .marks = attached[i]->marks});
    }
  }
  return found;
}

// OK if the layer is none.
absl::Status SnapshotterImpl::TakeConvertedLayer(const std::string& key, const std::string& parent,
                                                 const std::vector<Snapshot>& chain,
                                                 const Labels& labels) {
  const std::string& reference = labels.at(kReferenceLabel);
  ASSIGN_OR_RETURN(std::optional<LazyLayer> layer,
                   finder_->Find({key, reference, chain.size(), labels}), "layer {}", reference);
  if (!layer) return absl::OkStatus();
  if (const absl::Status stacks = CheckStacks(layer->marks, chain); !stacks.ok()) {
    if (!IsConverted(labels)) return absl::OkStatus();  // what it was made from is unpacked
    return Annotate(stacks, "layer " + reference);
  }
  // One for all name spaces for which this layer was found. The chain id alone says nothing: whoever
  // makes a converted image can put any into it.
  std::string name;
  for (const Snapshot& snapshot : store_->Children(parent)) {
    const auto label = snapshot.labels.find(kReferenceLabel);
    if (snapshot.layer && label != snapshot.labels.end() && label->second == reference &&
        snapshot.layer->layer.Key() == layer->layer.Key()) {
      name = snapshot.name;
    }
  }
  if (name.empty()) {
    Snapshot snapshot{.id = store_->NewId(),
                      .parent = parent,
                      .kind = Kind::kCommitted,
                      .labels = labels,
                      .layer = std::move(layer)};
    name = snapshot.name = fmt::format("lamina/{}/{}", snapshot.id, reference);
    RETURN_IF_ERROR(store_->Create(std::move(snapshot)).status());
  }
  Take(parent, reference, name);
  return absl::AlreadyExistsError(fmt::format("snapshot of layer {} exists", reference));
}

// containerd looks for the snapshot by parent and chain id next, and does not say for which name space:
// it must not find what another one is told at the same time.
void SnapshotterImpl::Take(const std::string& parent, const std::string& reference,
                           const std::string& name) {
  const std::pair place(parent, reference);
  std::unique_lock lock(mutex_);
  while (true) {
    Taken& taken = taken_[place];
    if (taken.name == name || taken.unseen == 0 || taken.until <= Clock::now()) {
      taken.unseen = taken.name == name ? taken.unseen + 1 : 1;
      taken.name = name;
      taken.until = Clock::now() + kLooksWithin;
      return;
    }
    const Clock::time_point until = taken.until;
    seen_.wait_until(lock, until);
  }
}

std::vector<Snapshot> SnapshotterImpl::ListTaken(
    const std::function<bool(const Snapshot&)>& matches) {
  std::vector<Snapshot> snapshots;
  std::lock_guard lock(mutex_);
  for (auto& [place, taken] : taken_) {
    absl::StatusOr<Snapshot> snapshot = store_->Get(taken.name);
    if (!snapshot.ok() || !matches(*snapshot)) continue;  // it may have been removed just now
    if (taken.unseen > 0) --taken.unseen;
    snapshots.push_back(*std::move(snapshot));
  }
  seen_.notify_all();
  return snapshots;
}

absl::StatusOr<std::vector<MountSpec>> SnapshotterImpl::Mounts(const std::string& key) {
  ASSIGN_OR_RETURN(const std::vector<Snapshot> chain, store_->Chain(key));
  if (chain[0].kind == Kind::kCommitted) {
    return absl::FailedPreconditionError(
        fmt::format("snapshot {} is committed: prepare or view one on it", key));
  }
  ASSIGN_OR_RETURN(const Mounted mounted,
                   MountLowers(PlanOf(chain[0], std::span(chain).subspan(1))), "snapshot {}", key);
  return SpecOf(chain[0], mounted);
}

absl::Status SnapshotterImpl::Commit(const std::string& name, const std::string& key,
                                     const Labels& labels) {
  if (name.empty()) return absl::InvalidArgumentError("a snapshot needs a name");
  ASSIGN_OR_RETURN(const Snapshot active, store_->Get(key));
  Usage usage;
  if (active.kind == Kind::kActive) {
    ASSIGN_OR_RETURN(usage, DiskUsageOf(FilesOf(active.id)), "commit snapshot {}", key);
  }
  RETURN_IF_ERROR(store_->Commit(key, name, labels, usage).status(), "commit snapshot {}", key);
  std::lock_guard lock(mutex_);
  uses_.erase(active.id);
  return absl::OkStatus();
}

absl::Status SnapshotterImpl::Remove(const std::string& key) {
  ASSIGN_OR_RETURN(const Snapshot removed, store_->Remove(key));
  {
    std::lock_guard lock(mutex_);
    std::erase_if(taken_, [&](const auto& taken) { return taken.second.name == key; });
  }
  Drop(removed.id);
  return absl::OkStatus();
}

// The directory by renaming, so that it does not count as a snapshot's from now on.
void SnapshotterImpl::Drop(uint64_t id) {
  {
    std::lock_guard lock(mutex_);
    uses_.erase(id);
  }
  const std::string path = PathOf(id);
  const std::string removed = fmt::format("{}/{}{}", directory_, kRemovedPrefix, id);
  if (::rename(path.c_str(), removed.c_str()) == 0) {
    remover_.Remove(removed);
  } else if (errno != ENOENT) {
    spdlog::warn("{}", std::string(ErrnoStatus(errno, "remove " + path).message()));
  }
}

absl::StatusOr<WrittenSnapshot> SnapshotterImpl::Written(const std::string& name_space,
                                                         const std::string& key) {
  // "default/7/key" (containerd, metadata/snapshot.go).
  const auto is_it = [&](const Snapshot& snapshot) {
    const size_t first = snapshot.name.find('/');
    const size_t second = snapshot.name.find('/', first + 1);
    return snapshot.kind == Kind::kActive && second != std::string::npos &&
           snapshot.name.substr(0, first) == name_space && snapshot.name.substr(second + 1) == key;
  };
  // containerd keeps what it has removed until it collects garbage: the last one made is meant.
  const std::vector<Snapshot> all = store_->List();
  const Snapshot* found = nullptr;
  for (const Snapshot& snapshot : all) {
    if (is_it(snapshot) && (found == nullptr || snapshot.id > found->id)) found = &snapshot;
  }
  if (found == nullptr) {
    return absl::NotFoundError(
        fmt::format("no active snapshot {} in the name space {}", key, name_space));
  }
  WrittenSnapshot written{.upper = FilesOf(found->id)};
  if (const auto label = found->labels.find(kLayersLabel); label != found->labels.end()) {
    written.layer_images = label->second;
  }
  std::vector<Snapshot> parents;
  if (!found->parent.empty()) {
    ASSIGN_OR_RETURN(parents, store_->Chain(found->parent), "snapshot {}", found->name);
  }
  for (const Part& part : PartsBelow(*found, parents)) {
    if (part.layer == nullptr) {
      return absl::FailedPreconditionError(fmt::format(
          "snapshot {}: a layer below it was unpacked, of an image that is not converted",
          found->name));
    }
    written.layers.push_back(part.layer->layer);
  }
  std::ranges::reverse(written.layers);
  return written;
}

absl::StatusOr<Usage> SnapshotterImpl::GetUsage(const std::string& key) {
  ASSIGN_OR_RETURN(const Snapshot snapshot, store_->Get(key));
  if (snapshot.kind == Kind::kCommitted) return snapshot.usage;
  if (snapshot.kind == Kind::kView) return Usage();  // it has none
  return DiskUsageOf(FilesOf(snapshot.id));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Snapshotter>> Snapshotter::Open(
    const SnapshotterOptions& options, fs::Engine& engine, std::unique_ptr<LayerFinder> finder) {
  // containerd mounts what it is told as it is: there is no way to quote that all of its versions know.
  if (const size_t place = options.state.find_first_of(",:\\"); place != std::string::npos) {
    return absl::InvalidArgumentError(
        fmt::format("state directory {}: paths in options of overlayfs cannot have '{}'",
                    options.state, options.state[place]));
  }
  const std::string directory = options.state + "/snapshots";
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "create directory " + directory);
  }
  ASSIGN_OR_RETURN(auto store, SnapshotStore::Open(directory + "/db"));
  ASSIGN_OR_RETURN(std::vector<std::string> overlay_options, fs::OverlayOptions());
  auto snapshotter = std::make_unique<SnapshotterImpl>(options, std::move(overlay_options), engine,
                                                       std::move(store), std::move(finder));
  RETURN_IF_ERROR(snapshotter->Restore());
  return snapshotter;
}

}  // namespace lamina::snapshotter
