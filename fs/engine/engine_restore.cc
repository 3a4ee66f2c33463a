// SPDX-License-Identifier: Apache-2.0
//
// What an engine does first: serve the mounts of the one before it, or clean up after it.
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "fs/engine/attach.h"
#include "fs/engine/engine_impl.h"
#include "fs/engine/lazy_origin.h"

namespace lamina::fs {
namespace {

// Attempts to get tables that were damaged, and the time between them. What is served over FUSE has
// its readers wait for so many.
constexpr std::chrono::seconds kRepairPause{2};
constexpr int kWaitAttempts = 10;

using chunkstore::LayerDescriptor;
using chunkstore::Origin;
using chunkstore::ReadStats;

std::vector<std::string> ListDirectory(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    names.push_back(entry.path().filename().string());
  }
  if (error) spdlog::error("read {}: {}", path, error.message());
  return names;
}

// Of the file systems that this engine serves; others have names of their own.
bool IsMountDescriptor(const std::string& name) { return name.starts_with(kBlobFsRecord); }

bool IsMountId(std::string_view name) {
  constexpr size_t kMaxDigits = 14;  // less than 2^48, as BlobFs wants it
  return !name.empty() && name[0] != '0' && name.size() <= kMaxDigits &&
         std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// Layers that are the same may be of different images.
std::pair<Digest, Digest> KeyOf(const LayerDescriptor& layer) {
  return {layer.digest, layer.section_table_digest};
}

void Lose(const MountRecord& record, const absl::Status& why, std::vector<MountRecord>& lost) {
  spdlog::error("mount {} at {} is lost: {}", record.description.id, record.description.target,
                std::string(why.message()));
  lost.push_back(record);
}

}  // namespace

absl::Status EngineImpl::RestoreMounts() {
  std::vector<std::string> names;
  if (holder_ != nullptr) names = holder_->names();
  // Without a directory nothing was mounted, and there is no need to wait for the index.
  if (std::none_of(names.begin(), names.end(), IsMountDescriptor) &&
      ListDirectory(state_ + "/mounts").empty()) {
    return RemoveBlobFs();
  }
  const auto start = std::chrono::steady_clock::now();
  std::string blob_fs_state;
  ASSIGN_OR_RETURN(Leftovers left, ReadRecords(blob_fs_state));

  std::lock_guard lock(mutex_);
  TakeOverErofs(std::move(left.erofs), blob_fs_state, left.lost);
  TakeOverTrees(std::move(left.trees), left.lost);
  if (!mounts_.empty() || !detached_.empty()) {
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    spdlog::info("took over {} mounts, and {} that are detached, in {:.0f} ms", mounts_.size(),
                 detached_.size(), time.count());
  }
  // All that unmounts comes after this. The mounter does nothing while the one before it waits for
  // an answer about a mount that it was making, which it has by now, or for one of a connection that
  // ends here.
  if (holder_ != nullptr) {
    for (const std::string& name : holder_->names()) {
      if (!IsMountDescriptor(name)) continue;
      holder_->Take(name);
      RETURN_IF_ERROR(holder_->Remove(name));
    }
  }
  if (blob_fs_ == nullptr) RETURN_IF_ERROR(RemoveBlobFs());
  for (const MountRecord& record : left.lost) CleanUp(record);
  ReleaseUnmounted();
  CleanUpUnrecorded();
  ForgetGone();
  WatchOverlays();
  restored_uses_.clear();
  restored_copies_.clear();
  StartRepair();
  return absl::OkStatus();
}

void EngineImpl::WatchOverlays() {
  // A target may be in a tree that is not served yet: looking it up would wait for a repair, which has
  // not begun.
  for (const auto& [target, mount] : mounts_) {
    if (mount.served->waiting.has_value()) return;
  }
  const absl::StatusOr<std::vector<MountInfo>> mounted = ReadMountInfo();
  if (!mounted.ok()) return spdlog::error("{}", std::string(mounted.status().message()));
  std::map<uint64_t, dev_t> devices;  // by mount
  for (const MountInfo& info : *mounted) devices[info.id] = info.device;
  for (auto& [target, mount] : mounts_) WatchOverlay(mount, devices[mount.record.kernel_id]);
}

void EngineImpl::StartRepair() {
  std::vector<std::string> ids;
  const auto consider = [&ids](const MountState& mount) {
    if (mount.served->blobs.empty() && !mount.record.layers.empty()) ids.push_back(mount.id());
  };
  for (const auto& [target, mount] : mounts_) consider(mount);
  for (const MountState& mount : detached_) consider(mount);
  if (ids.empty()) return;
  repair_ = std::jthread(
      [this, ids = std::move(ids)](std::stop_token stop) { Repair(std::move(stop), ids); });
}

absl::Status EngineImpl::RemoveBlobFs() {
  absl::Status status = mounter_->Unmount(state_ + "/fuse", /*detach=*/true);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<EngineImpl::Leftovers> EngineImpl::ReadRecords(std::string& blob_fs_state) {
  Leftovers left;
  std::map<uint64_t, std::shared_ptr<ServedImage>> served;  // by EROFS, by number
  ASSIGN_OR_RETURN(const auto records, index_->Mounts());
  for (const auto& [id, text] : records) {
    if (id == kBlobFsRecord) {
      blob_fs_state = text;
      continue;
    }
    absl::StatusOr<MountRecord> record = ParseMountRecord(text);
    if (!record.ok() || !IsMountId(id) || record->description.id != id) {
      spdlog::warn("the record of mount {} is damaged and dropped: {}", id,
                   std::string(record.status().message()));
      RETURN_IF_ERROR(index_->RemoveMount(id));
    } else if (record->phase == MountRecord::Phase::kMounting || holder_ == nullptr) {
      left.lost.push_back(*std::move(record));
    } else {
      MountState mount{.record = *std::move(record)};
      // Before images were shared, blobs were served by the mount's own number.
      uint64_t& number = mount.record.served_image;
      if (mount.is_erofs() && number == 0) {
        number = std::strtoull(id.c_str(), nullptr, 10);
        ::mkdir(ServedImagePath(state_, number).c_str(), 0700);  // so that nobody else gets it
      }
      if (mount.is_erofs()) mount.served = served[number];
      if (mount.served == nullptr) {
        mount.served = std::make_shared<ServedImage>();
        mount.served->stats = std::make_shared<ReadStats>();
      }
      if (mount.is_erofs()) {
        served[number] = mount.served;
        mount.served->number = number;
        mount.served->mounted = true;
        mount.served->device = MountedDevice(ServedImagePath(state_, number));
        mount.served->key = KeyToShare(mount.record);
        mount.has_overlay = mount.record.description.writable;
      }
      (mount.is_erofs() ? left.erofs : left.trees).push_back(std::move(mount));
    }
  }
  return left;
}

std::shared_ptr<Origin> EngineImpl::OriginOf(const std::string& image,
                                             const registry::Settings& settings) {
  return MakeLazyOrigin(image, [this, image, settings] { return AccessFor(image, settings); });
}

// Attaches the blobs of all mounts, each once, as far as what is on the node is enough. Takes the
// other mounts out of the list and returns them. If nothing is on the node (--cache=none), readers
// have to wait for the origin.
std::vector<MountState> EngineImpl::AttachLocalBlobs(std::vector<MountState>& mounts) {
  std::map<std::string, std::shared_ptr<Origin>> origins;  // by image
  std::map<std::pair<Digest, Digest>, size_t> indices;     // by what a layer is
  std::vector<LayerToAttach> layers;
  for (const MountState& mount : mounts) {
    const std::vector<std::string> images = ImagesOfLayers(mount.record);
    for (size_t i = 0; i < images.size(); ++i) {
      std::shared_ptr<Origin>& origin = origins[images[i]];
      if (origin == nullptr) origin = OriginOf(images[i], mount.record.registry);
      const LayerDescriptor& layer = mount.record.layers[i];
      if (!indices.emplace(KeyOf(layer), layers.size()).second) continue;
      layers.push_back({layer, keeps_nothing_ ? origin : nullptr});
    }
  }
  auto blobs = AttachAll(*store_, layers);
  // Again, with the origin that they will need; that is cheap now.
  std::vector<bool> has_origin(layers.size(), keeps_nothing_);
  std::vector<MountState> incomplete;
  std::erase_if(mounts, [&](MountState& mount) {
    if (!mount.served->blobs.empty()) return false;  // with another mount of it
    const std::vector<std::string> images = ImagesOfLayers(mount.record);
    for (size_t i = 0; i < images.size(); ++i) {
      const LayerDescriptor& layer = mount.record.layers[i];
      const size_t index = indices.at(KeyOf(layer));
      auto& blob = blobs[index];
      if (blob.ok() && !has_origin[index]) blob = store_->Attach(layer, origins[images[i]]);
      has_origin[index] = true;
      if (!blob.ok()) {
        spdlog::warn("mount {}: {}", mount.id(), std::string(blob.status().message()));
        mount.served->blobs.clear();
        incomplete.push_back(std::move(mount));
        return true;
      }
      mount.served->blobs.push_back(*blob);
    }
    return false;
  });
  return incomplete;
}

void EngineImpl::TakeOverErofs(std::vector<MountState> mounts, const std::string& state,
                               std::vector<MountRecord>& lost) {
  UniqueFd device = holder_ == nullptr ? UniqueFd() : holder_->Take(kBlobFsRecord);
  absl::Status status = device.valid() && !state.empty()
                            ? absl::OkStatus()
                            : absl::UnavailableError("nobody kept its descriptor");
  std::vector<MountState> incomplete;
  if (status.ok()) {
    incomplete = AttachLocalBlobs(mounts);
    std::map<ServedImage*, bool> served;  // false: all its mounts are detached
    for (const MountState& mount : mounts) {
      served[mount.served.get()] |= mount.record.phase == MountRecord::Phase::kMounted;
    }
    std::vector<BlobFs::Directory> directories;
    std::vector<BlobFs::Directory> removed;
    for (const auto& [image, mounted] : served) {
      (mounted ? directories : removed).push_back({image->number, image->blobs, image->stats});
    }
    auto blob_fs = BlobFs::TakeOver(state_ + "/fuse", {std::move(device), state},
                                    std::move(directories), std::move(removed));
    status = blob_fs.status();
    if (status.ok()) {
      blob_fs_ = *std::move(blob_fs);
      ReplaceDevice(kBlobFsRecord, *blob_fs_);
    } else {
      holder_->Remove(kBlobFsRecord).IgnoreError();
    }
  }
  for (std::vector<MountState>* list : {&mounts, &incomplete}) {
    for (MountState& mount : *list) {
      if (status.ok()) {
        Adopt(std::move(mount));
      } else {
        Lose(mount.record, status, lost);
      }
    }
  }
}

void EngineImpl::TakeOverTrees(std::vector<MountState> mounts, std::vector<MountRecord>& lost) {
  std::vector<MountState> incomplete = AttachLocalBlobs(mounts);
  for (std::vector<MountState>* list : {&mounts, &incomplete}) {
    for (MountState& mount : *list) {
      FuseHandover handover{holder_->Take(DescriptorName(mount.record)), mount.record.fuse_state};
      absl::Status status;
      if (!handover.device.valid()) {
        status = absl::UnavailableError("nobody kept its descriptor");
      } else if (list == &mounts) {
        status = StartTree(mount, std::move(handover));
      } else {
        mount.served->waiting = std::move(handover);
      }
      if (status.ok()) {
        Adopt(std::move(mount));
      } else {
        holder_->Remove(DescriptorName(mount.record)).IgnoreError();
        Lose(mount.record, status, lost);
      }
    }
  }
}

absl::Status EngineImpl::StartTree(MountState& mount, FuseHandover handover) {
  ServedImage& served = *mount.served;
  // The file that the inode numbers are from, even if this engine would build another one.
  ASSIGN_OR_RETURN(served.metadata, OpenMergedMetadata(mount.record.metadata));
  const MountPaths paths(state_, mount.id(), "");
  ASSIGN_OR_RETURN(served.tree, TreeFs::TakeOver({.mountpoint = mount.record.description.writable
                                                                    ? paths.lower
                                                                    : mount.target(),
                                                  .source = paths.directory,
                                                  .metadata = served.metadata->mapping.bytes(),
                                                  .blobs = served.blobs,
                                                  .stats = served.stats},
                                                 std::move(handover)));
  ReplaceDevice(DescriptorName(mount.record), *served.tree);
  return absl::OkStatus();
}

MountState* EngineImpl::FindById(const std::string& id) {
  for (auto& [target, mount] : mounts_) {
    if (mount.id() == id) return &mount;
  }
  for (MountState& mount : detached_) {
    if (mount.id() == id) return &mount;
  }
  return nullptr;
}

// A mount of EROFS gives errors until its blobs are there.
void EngineImpl::Repair(std::stop_token stop, std::vector<std::string> ids) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  for (int attempt = 1;; ++attempt) {
    const bool may_wait = attempt < kWaitAttempts;
    std::erase_if(ids, [&](const std::string& id) { return RepairMount(id, may_wait); });
    if (ids.empty()) return;
    std::unique_lock lock(mutex);
    if (stopped.wait_for(lock, stop, kRepairPause, [&stop] { return stop.stop_requested(); })) {
      return;
    }
  }
}

// True if nothing more is to be done about it.
bool EngineImpl::RepairMount(const std::string& id, bool may_wait) {
  std::vector<LayerToAttach> layers;
  {
    std::lock_guard lock(mutex_);
    const MountState* mount = FindById(id);
    if (mount == nullptr) return true;
    std::map<std::string, std::shared_ptr<Origin>> origins;
    const std::vector<std::string> images = ImagesOfLayers(mount->record);
    for (size_t i = 0; i < images.size(); ++i) {
      std::shared_ptr<Origin>& origin = origins[images[i]];
      if (origin == nullptr) origin = OriginOf(images[i], mount->record.registry);
      layers.push_back({mount->record.layers[i], origin});
    }
  }
  auto blobs = AttachAll(*store_, layers);  // may wait for the origin
  std::lock_guard lock(mutex_);
  if (handed_over_) return true;  // the next engine does it
  MountState* mount = FindById(id);
  if (mount == nullptr) return true;
  ServedImage& served = *mount->served;
  const bool mounted = mount->record.phase == MountRecord::Phase::kMounted;
  absl::Status status;
  if (served.blobs.empty()) {  // else it was done for another mount of it
    for (auto& blob : blobs) {
      if (status.ok()) status = blob.status();
      if (blob.ok()) served.blobs.push_back(*std::move(blob));
    }
    if (!status.ok()) served.blobs.clear();
    if (status.ok() && mount->is_erofs()) {
      status = blob_fs_->Add({served.number, served.blobs, served.stats});
      if (!status.ok()) served.blobs.clear();
      if (!served.mounted) blob_fs_->Remove(served.number);
    } else if (status.ok()) {
      status = StartTree(*mount, *std::exchange(served.waiting, std::nullopt));
    }
  }
  if (status.ok()) {
    spdlog::info("mount {} is served again", id);
    if (mounted) EnsurePrefetch(*mount);
    return true;
  }
  spdlog::error("mount {} at {}: {}", id, mount->target(), std::string(status.message()));
  if (mount->is_erofs() || (may_wait && served.waiting.has_value())) return false;
  served.waiting.reset();  // its readers get errors
  holder_->Remove(DescriptorName(mount->record)).IgnoreError();
  return true;
}

void EngineImpl::ReplaceDevice(const std::string& name, const FuseFs& fs) {
  if (!fs.has_new_device()) return;
  absl::Status status = holder_->Remove(name);
  if (status.ok()) status = holder_->Store(name, fs.device());
  if (!status.ok()) spdlog::error("{}", std::string(status.message()));
}

// One for all mounts of an image, because each writes a file.
std::shared_ptr<void> EngineImpl::UseImage(const MountRecord& record) {
  std::string name = record.description.image;
  std::vector<std::string> texts{record.description.manifest_digest};
  for (const MountedImage& image : record.description.layer_images) {
    name += " + " + image.image;
    texts.push_back(image.manifest_digest);
  }
  std::vector<Digest> manifests;
  for (const std::string& text : texts) {
    const absl::StatusOr<Digest> manifest = Digest::Parse(text);
    if (!manifest.ok()) return images_.UseLayers(record.layers);
    manifests.push_back(*manifest);
  }
  const Digest digest = DigestOfImages(manifests);
  std::shared_ptr<void>& use = restored_uses_[digest.ToString()];
  if (use == nullptr) {
    use = images_.Use({.image = name, .manifest_digest = digest, .layers = record.layers});
  }
  return use;
}

void EngineImpl::RestoreCopies(MountState& mount) {
  constexpr std::string_view kUpper = "/upper";
  for (const std::string& upper : mount.record.description.lower_uppers) {
    if (!upper.ends_with(kUpper)) continue;
    std::shared_ptr<UpperCopy>& copy = restored_copies_[upper];
    if (copy == nullptr) {
      copy = std::make_shared<UpperCopy>(upper.substr(0, upper.size() - kUpper.size()));
    }
    mount.copies.push_back(copy);
  }
}

void EngineImpl::Adopt(MountState mount) {
  if (!mount.record.writable_dir.empty()) {
    absl::StatusOr<UniqueFd> lock = LockWritableDirectory(mount.record.writable_dir);
    if (lock.ok()) mount.writable_lock = *std::move(lock);  // or the user has moved it
  }
  mount.image_use = UseImage(mount.record);
  RestoreCopies(mount);
  for (const auto& blob : mount.served->blobs) blob->ShareChunks();
  const bool mounted = mount.record.phase == MountRecord::Phase::kMounted;
  if (mounted) EnsurePrefetch(mount);
  if (mounted && !mounts_.contains(mount.target())) {
    const std::string target = mount.target();
    mounts_.emplace(target, std::move(mount));
  } else {
    mount.record.phase = MountRecord::Phase::kDetached;
    detached_.push_back(std::move(mount));
  }
}

void EngineImpl::CleanUp(const MountRecord& lost) {
  const std::string& target = lost.description.target;
  if (lost.phase == MountRecord::Phase::kMounted) {
    spdlog::warn("{} was left mounted, and nothing serves it: unmounting it", target);
    cleaned_targets_.insert(target);
  }
  if (absl::Status status = UnmountParts(lost, /*detach=*/true); !status.ok()) {
    spdlog::error("{}", std::string(status.message()));
    return;
  }
  Forget(lost);
}

// Directories of mounts without a record.
void EngineImpl::CleanUpUnrecorded() {
  std::set<std::string> known;
  const auto know = [&known](const MountState& mount) {
    known.insert(mount.id());
    known.insert(fmt::format("{}{}", kServedImagePrefix, mount.served->number));
  };
  for (const auto& [target, mount] : mounts_) know(mount);
  for (const MountState& mount : detached_) know(mount);
  for (const auto& [upper, copy] : restored_copies_) {
    known.insert(std::filesystem::path(upper).parent_path().filename());
  }
  for (const std::string& id : ListDirectory(state_ + "/mounts")) {
    if (known.contains(id)) continue;
    const MountPaths paths(state_, id, "");
    std::vector<std::string> targets{paths.own_target, paths.lower};
    // What is below that is the image's, and may lead anywhere.
    if (id.starts_with(kServedImagePrefix)) targets = {paths.directory};
    absl::Status status;
    for (const std::string& target : targets) {
      const absl::Status unmounted = mounter_->Unmount(target, /*detach=*/true);
      if (!absl::IsNotFound(unmounted)) status.Update(unmounted);
    }
    if (status.ok()) RemoveOurs(paths.directory);
  }
}

}  // namespace lamina::fs
