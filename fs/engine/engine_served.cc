// SPDX-License-Identifier: Apache-2.0
//
// How one EROFS file system serves all mounts of an image, from the first mount to the last user.
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "fs/engine/engine_impl.h"

namespace lamina::fs {
namespace {

using chunkstore::ReadStats;

// How long an unmount waits for the kernel to let go of the last file, in small steps.
constexpr int kCloseAttempts = 20;
constexpr std::chrono::microseconds kClosePause{200};

// Mounts on top of each other that Release() takes off. Nobody makes any there.
constexpr int kMaxStacked = 16;

}  // namespace

std::string ServedImagePath(const std::string& state, uint64_t number) {
  return fmt::format("{}/mounts/{}{}", state, kServedImagePrefix, number);
}

std::string KeyToShare(const MountRecord& record) {
  const MountDescription& mount = record.description;
  if (mount.transport != Transport::kErofs || record.metadata_inode == 0) return "";
  std::string key = fmt::format("{}\n{}\n{}\n{}", mount.loop ? "loop" : "file", record.metadata,
                                record.metadata_inode, mount.image);
  for (const MountedImage& image : mount.layer_images) key += "\n" + image.image;
  return key;
}

uint64_t InodeOf(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? info.st_ino : 0;
}

dev_t MountedDevice(const std::string& path) {
  struct stat root {};
  struct stat parent {};
  if (::stat(path.c_str(), &root) != 0 || ::stat((path + "/..").c_str(), &parent) != 0) return 0;
  return root.st_dev == parent.st_dev ? 0 : root.st_dev;
}

std::shared_ptr<ServedImage> EngineImpl::FindServed(const std::string& key) {
  if (key.empty()) return nullptr;
  for (const auto& [target, mount] : mounts_) {
    if (mount.served->key == key) return mount.served;
  }
  for (const MountState& mount : detached_) {
    if (mount.served->key == key) return mount.served;
  }
  return nullptr;
}

void EngineImpl::Share(MountState& mount) {
  std::shared_ptr<ServedImage> there = FindServed(mount.served->key);
  if (there == nullptr) return;
  if (there->blobs.size() != mount.served->blobs.size()) return;  // they are being fetched again
  if (const std::string path = ServedImagePath(state_, there->number);
      MountedDevice(path) != there->device) {
    spdlog::warn(
        "{} was unmounted, or something is on it: later mounts of its image do not share it", path);
    there->key.clear();
    return;
  }
  mount.served = std::move(there);
}

// Its mount is not where users are, so that it stays whatever they do with theirs.
absl::Status EngineImpl::MountServed(ServedImage& served, bool loop) {
  if (blob_fs_ == nullptr) RETURN_IF_ERROR(StartBlobFs());
  const std::string path = ServedImagePath(state_, served.number);
  if (::mkdir(path.c_str(), 0700) != 0) return ErrnoStatus(errno, "create directory " + path);
  served.mounted = true;  // in part, which Release() undoes
  RETURN_IF_ERROR(blob_fs_->Add({served.number, served.blobs, served.stats}));
  std::vector<std::string> devices;
  for (size_t slot = 1; slot <= served.blobs.size(); ++slot) {
    devices.push_back(fmt::format("{}/{}/{}", blob_fs_->mountpoint(), served.number, slot));
  }
  RETURN_IF_ERROR(mounter_->MountErofs(served.metadata->path, devices, path, loop));
  served.device = MountedDevice(path);
  return absl::OkStatus();
}

// An overlay may be in use elsewhere when it is unmounted here, and then needs its directories. That
// the image below it is in use says nothing about it.
void EngineImpl::WatchOverlay(MountState& mount, dev_t device) {
  if (!mount.has_overlay) return;
  const absl::StatusOr<int> watch = watches_.Add(mount.target(), device);
  if (watch.ok()) {
    mount.watch = *watch;
  } else {
    spdlog::warn("mount {}: its directories are kept until its image is not used by others: {}",
                 mount.id(), std::string(watch.status().message()));
  }
}

template <typename Predicate>
bool EngineImpl::AnyOther(const MountState& mount, const Predicate& matches) const {
  const auto is_one = [&](const MountState& other) { return &other != &mount && matches(other); };
  return std::ranges::any_of(mounts_, [&](const auto& entry) { return is_one(entry.second); }) ||
         std::ranges::any_of(detached_, is_one);
}

bool EngineImpl::HasOtherMounts(const MountState& mount) {
  return AnyOther(mount, [&](const MountState& other) { return other.served == mount.served; });
}

// One that is not watched counts as in use until nobody else has the image, detached ones that are not
// watched left aside, and the kernel has no file of it open.
bool EngineImpl::OverlayInUse(const MountState& mount) {
  if (!mount.has_overlay) return false;
  if (mount.watch.has_value()) return !watches_.Ended(*mount.watch);
  const bool has_known_others = AnyOther(mount, [&](const MountState& other) {
    const bool is_known = other.record.phase == MountRecord::Phase::kMounted ||
                          !other.has_overlay || other.watch.has_value();
    return other.served == mount.served && is_known;
  });
  if (has_known_others) return true;
  Release(*mount.served);
  return ServedInUse(*mount.served);
}

bool EngineImpl::ServedInUse(ServedImage& served) {
  return blob_fs_ != nullptr && blob_fs_->InUse(served.number);
}

void EngineImpl::Release(ServedImage& served) {
  served.prefetch = nullptr;
  if (!std::exchange(served.mounted, false)) return;
  served.key.clear();
  absl::Status status;
  for (int mounts = 0; status.ok() && mounts < kMaxStacked; ++mounts) {
    status = mounter_->Unmount(ServedImagePath(state_, served.number), /*detach=*/true);
  }
  if (!status.ok() && !absl::IsNotFound(status)) {
    spdlog::error("{}", std::string(status.message()));
  }
  if (blob_fs_ != nullptr) blob_fs_->Remove(served.number);
}

void EngineImpl::ReleaseUnmounted() {
  std::set<ServedImage*> mounted;
  for (const auto& [target, mount] : mounts_) mounted.insert(mount.served.get());
  for (const MountState& mount : detached_) {
    if (!mounted.contains(mount.served.get())) Release(*mount.served);
  }
}

bool EngineImpl::TryForget(MountState& mount) {
  ServedImage& served = *mount.served;
  if (mount.is_erofs()) {
    if (OverlayInUse(mount)) return false;
    if (!HasOtherMounts(mount)) {
      Release(served);
      if (ServedInUse(served)) return false;
      KeepStats(mount);
      ::rmdir(ServedImagePath(state_, served.number).c_str());
    }
    if (mount.watch.has_value()) watches_.Forget(*mount.watch);
  } else {
    served.prefetch = nullptr;
    const bool in_use = served.waiting.has_value()
                            ? !HasEnded(served.waiting->device)
                            : served.tree != nullptr && !served.tree->ended();
    if (in_use) return false;
    KeepStats(mount);
  }
  Forget(mount.record);
  return true;
}

void EngineImpl::Detach(MountState mount) {
  if (mount.recording) mount.served->stats->touches.Stop().IgnoreError();
  // The kernel closes the files of an unmounted EROFS by requests of ours that it does not wait for, and
  // mount namespaces that are being made have what is mounted for a moment.
  for (int attempt = 0; attempt < kCloseAttempts; ++attempt) {
    if (TryForget(mount)) return SweepDetached();
    std::this_thread::sleep_for(kClosePause);
  }
  mount.record.phase = MountRecord::Phase::kDetached;
  if (absl::Status status = Put(mount.record); !status.ok()) {
    spdlog::error("{}", std::string(status.message()));
  }
  detached_.push_back(std::move(mount));
  SweepDetached();
}

void EngineImpl::SweepDetached() {
  // One that goes may leave another one as the last user of an image.
  for (bool again = true; again;) {
    again = false;
    for (auto mount = detached_.begin(); mount != detached_.end();) {
      if (TryForget(*mount)) {
        mount = detached_.erase(mount);
        again = true;
      } else {
        ++mount;
      }
    }
  }
}

void EngineImpl::KeepStats(const MountState& mount) {
  const std::string& image = mount.record.description.image;
  const bool has_others = AnyOther(
      mount, [&](const MountState& other) { return other.record.description.image == image; });
  if (!has_others) {
    past_stats_.erase(image);
    return;
  }
  std::shared_ptr<ReadStats>& past = past_stats_[image];
  if (past == nullptr) past = std::make_shared<ReadStats>();
  mount.served->stats->AddTo(*past);
}

}  // namespace lamina::fs
