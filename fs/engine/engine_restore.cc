// SPDX-License-Identifier: Apache-2.0
//
// What an engine does first: serve the mounts of the one before it, or clean up after it.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <system_error>

#include "fs/engine/engine_impl.h"
#include "fs/engine/lazy_origin.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
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
  for (MountRecord& record : left.lost) CleanUp(std::move(record));
  CleanUpUnrecorded();
  ForgetGone();
  return absl::OkStatus();
}

absl::Status EngineImpl::RemoveBlobFs() {
  absl::Status status = mounter_->Unmount(state_ + "/fuse", /*detach=*/true);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<EngineImpl::Leftovers> EngineImpl::ReadRecords(std::string& blob_fs_state) {
  Leftovers left;
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
      auto& list = record->description.transport == Transport::kErofs ? left.erofs : left.trees;
      list.push_back({.record = *std::move(record), .stats = std::make_shared<ReadStats>()});
    }
  }
  return left;
}

// Attaches the blobs of all mounts, each once; mounts whose blobs cannot be attached are taken out
// and lost.
void EngineImpl::AttachBlobs(std::vector<MountState>& mounts, std::vector<MountRecord>& lost) {
  std::map<std::string, std::shared_ptr<Origin>> origins;  // by image
  std::map<std::pair<Digest, Digest>, size_t> indices;     // by what a layer is
  std::vector<LayerToAttach> layers;
  for (const MountState& mount : mounts) {
    std::shared_ptr<Origin>& origin = origins[mount.record.description.image];
    if (origin == nullptr) origin = MakeLazyOrigin(mount.record.description.image);
    for (const LayerDescriptor& layer : mount.record.layers) {
      if (indices.emplace(KeyOf(layer), layers.size()).second) layers.push_back({layer, origin});
    }
  }
  const auto blobs = AttachAll(*store_, layers);
  std::erase_if(mounts, [&](MountState& mount) {
    for (const LayerDescriptor& layer : mount.record.layers) {
      const auto& blob = blobs[indices.at(KeyOf(layer))];
      if (!blob.ok()) {
        Lose(mount.record, blob.status(), lost);
        return true;
      }
      mount.blobs.push_back(*blob);
    }
    return false;
  });
}

void EngineImpl::TakeOverErofs(std::vector<MountState> mounts, const std::string& state,
                               std::vector<MountRecord>& lost) {
  UniqueFd device = holder_ == nullptr ? UniqueFd() : holder_->Take(kBlobFsRecord);
  absl::Status status = device.valid() && !state.empty()
                            ? absl::OkStatus()
                            : absl::UnavailableError("nobody kept its descriptor");
  if (status.ok()) {
    AttachBlobs(mounts, lost);
    std::vector<BlobFs::Directory> directories;
    std::vector<BlobFs::Directory> removed;
    for (const MountState& mount : mounts) {
      auto& list = mount.record.phase == MountRecord::Phase::kMounted ? directories : removed;
      list.push_back({BlobFsId(mount.record), mount.blobs, mount.stats});
    }
    auto blob_fs = BlobFs::TakeOver(state_ + "/fuse", {std::move(device), state},
                                    std::move(directories), std::move(removed));
    status = blob_fs.status();
    if (status.ok()) {
      blob_fs_ = *std::move(blob_fs);
    } else {
      holder_->Remove(kBlobFsRecord).IgnoreError();
    }
  }
  for (MountState& mount : mounts) {
    if (status.ok()) {
      Adopt(std::move(mount));
    } else {
      Lose(mount.record, status, lost);
    }
  }
}

void EngineImpl::TakeOverTrees(std::vector<MountState> mounts, std::vector<MountRecord>& lost) {
  AttachBlobs(mounts, lost);
  for (MountState& mount : mounts) {
    if (absl::Status status = TakeOverTree(mount); status.ok()) {
      Adopt(std::move(mount));
    } else {
      holder_->Remove(DescriptorName(mount.record)).IgnoreError();
      Lose(mount.record, status, lost);
    }
  }
}

absl::Status EngineImpl::TakeOverTree(MountState& mount) {
  UniqueFd device = holder_->Take(DescriptorName(mount.record));
  if (!device.valid()) return absl::UnavailableError("nobody kept its descriptor");
  // The file that the inode numbers are from, even if this engine would build another one.
  ASSIGN_OR_RETURN(mount.metadata, OpenMergedMetadata(mount.record.metadata));
  const MountPaths paths(state_, mount.id(), "");
  ASSIGN_OR_RETURN(mount.tree, TreeFs::TakeOver({.mountpoint = mount.record.description.writable
                                                                   ? paths.lower
                                                                   : mount.target(),
                                                 .source = paths.directory,
                                                 .metadata = mount.metadata->mapping.bytes(),
                                                 .blobs = mount.blobs,
                                                 .stats = mount.stats},
                                                {std::move(device), mount.record.fuse_state}));
  return absl::OkStatus();
}

void EngineImpl::Adopt(MountState mount) {
  const bool mounted = mount.record.phase == MountRecord::Phase::kMounted;
  if (mounted && !mounts_.contains(mount.target())) {
    const std::string target = mount.target();
    mounts_.emplace(target, std::move(mount));
  } else {
    detached_.push_back(std::move(mount));
  }
}

void EngineImpl::CleanUp(MountRecord lost) {
  const std::string target = lost.description.target;
  if (lost.phase == MountRecord::Phase::kMounted) {
    spdlog::warn("{} was left mounted, and nothing serves it: unmounting it", target);
    cleaned_targets_.insert(target);
  }
  lost.kernel_id = 0;  // the kernel may have given it to another mount
  if (absl::Status status = UnmountParts(lost, /*detach=*/true); !status.ok()) {
    spdlog::error("{}", std::string(status.message()));
    return;
  }
  Forget(lost);
}

// Directories of mounts without a record.
void EngineImpl::CleanUpUnrecorded() {
  std::set<std::string> known;
  for (const auto& [target, mount] : mounts_) known.insert(mount.id());
  for (const MountState& mount : detached_) known.insert(mount.id());
  for (const std::string& id : ListDirectory(state_ + "/mounts")) {
    if (known.contains(id)) continue;
    const MountPaths paths(state_, id, "");
    const absl::Status status = mounter_->Unmount(paths.lower, /*detach=*/true);
    if (status.ok() || absl::IsNotFound(status)) RemoveTree(paths.directory);
  }
}

}  // namespace lamina::fs
