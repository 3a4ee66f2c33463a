// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/layer_mounts.h"

#include <spdlog/spdlog.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <utility>

#include "chunkstore/base/digest.h"

namespace lamina::snapshotter {
namespace {

using Clock = std::chrono::steady_clock;

// Each layer of a chain is looked into for a name that is in none of them.
constexpr size_t kMaxStacked = 16;
// Enough of a digest that two are not the same; paths are short, because all of a snapshot must fit
// into one page (mount(2)).
constexpr size_t kPathDigits = 20;

std::string NameOf(const LayerGroup& group) {
  Hasher hasher;
  hasher.Update(AsBytes(group.keep_marks ? "layer" : "merged"));
  for (const LazyLayer& layer : group.layers) {
    hasher.Update(std::as_bytes(std::span(layer.layer.digest.bytes)));
    hasher.Update(std::as_bytes(std::span(layer.layer.section_table_digest.bytes)));
  }
  return "L" + hasher.Finish().Hex().substr(0, kPathDigits);
}

// Whether something is mounted at a directory whose parent is not a mount point itself.
bool IsMountPoint(const std::string& path) {
  struct stat inside {};
  struct stat outside {};
  return ::stat(path.c_str(), &inside) == 0 && ::stat((path + "/..").c_str(), &outside) == 0 &&
         inside.st_dev != outside.st_dev;
}

}  // namespace

std::vector<LayerGroup> GroupLayers(std::vector<LazyLayer> layers, bool is_base) {
  std::vector<LayerGroup> groups;
  if (layers.empty()) return groups;
  // So many from below that what lies above can be stacked.
  size_t merged = is_base ? 1 : 0;
  if (is_base) {
    for (size_t i = 1; i < layers.size(); ++i) {
      const erofs::LayerMarks& marks = layers[i].marks;
      if (marks.implied_directories || marks.opaque_root) merged = i + 1;
    }
    if (layers.size() - merged >= kMaxStacked) merged = layers.size();
  }
  const auto above = layers.begin() + static_cast<ptrdiff_t>(merged);
  if (merged > 0) groups.push_back({{layers.begin(), above}, /*keep_marks=*/false});
  for (auto layer = above; layer != layers.end(); ++layer) {
    groups.push_back({{*layer}, /*keep_marks=*/true});
  }
  return groups;
}

struct LayerMounts::Entry {
  std::string path;
  std::optional<LayerGroup> group;  // not known of what was taken over and nobody asked for yet
  std::mutex mutex;                 // held while it is mounted or unmounted
  // Guarded by the mutex of LayerMounts.
  int users = 0;
  Clock::time_point idle_since = Clock::now();
};

LayerMounts::LayerMounts(fs::Engine& engine, std::string directory, registry::Settings settings,
                         std::chrono::milliseconds idle)
    : engine_(engine),
      directory_(std::move(directory)),
      settings_(std::move(settings)),
      idle_(idle) {
  TakeOver();
  reaper_ = std::jthread([this](const std::stop_token& stop) { UnmountIdle(stop); });
}

LayerMounts::~LayerMounts() = default;

void LayerMounts::TakeOver() {
  const auto reports = engine_.Report(std::nullopt);
  if (!reports.ok()) return;
  for (const fs::MountReport& report : *reports) {
    const std::string& path = report.mount.target;
    if (!path.starts_with(directory_ + "/L")) continue;
    auto entry = std::make_shared<Entry>();
    entry->path = path;
    entries_.emplace(path, std::move(entry));
  }
  // Mount points of which the engine does not know. What is still mounted there is dead, if its record
  // is lost for example: it has attributes, but nobody serves its content.
  std::error_code error;
  for (const auto& item : std::filesystem::directory_iterator(directory_, error)) {
    const std::string path = item.path().string();
    if (!item.path().filename().string().starts_with('L') || entries_.contains(path)) continue;
    while (::umount2(path.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) == 0) {
      spdlog::warn("{}: what is mounted there is served by nobody, and is unmounted", path);
    }
    ::rmdir(path.c_str());
  }
}

LayerMounts::Use LayerMounts::Reserve(const std::vector<LayerGroup>& groups) {
  Use use;
  use.mounts_ = this;
  std::lock_guard lock(mutex_);
  for (const LayerGroup& group : groups) {
    std::string path = fmt::format("{}/{}", directory_, NameOf(group));
    std::shared_ptr<Entry>& entry = entries_[path];
    if (entry == nullptr) {
      entry = std::make_shared<Entry>();
      entry->path = std::move(path);
    }
    if (!entry->group) entry->group = group;
    ++entry->users;
    use.entries_.push_back(entry);
  }
  return use;
}

void LayerMounts::Release(const std::vector<std::shared_ptr<Entry>>& entries) {
  {
    std::lock_guard lock(mutex_);
    for (const std::shared_ptr<Entry>& entry : entries) {
      --entry->users;
      entry->idle_since = Clock::now();
    }
    released_ = true;
  }
  wake_.notify_all();
}

absl::StatusOr<std::vector<std::string>> LayerMounts::Mount(const Use& use) {
  std::vector<std::string> paths;
  for (const std::shared_ptr<Entry>& entry : use.entries_) {
    RETURN_IF_ERROR(MountEntry(*entry));
    paths.push_back(entry->path);
  }
  return paths;
}

absl::Status LayerMounts::MountEntry(Entry& entry) {
  std::lock_guard lock(entry.mutex);
  // Anybody may have unmounted it, and an empty directory must not be taken for a layer.
  if (IsMountPoint(entry.path)) return absl::OkStatus();
  if (::mkdir(entry.path.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "create directory " + entry.path);
  }
  fs::LayersRequest request{
      .keep_marks = entry.group->keep_marks, .target = entry.path, .registry = settings_};
  for (const LazyLayer& layer : entry.group->layers) {
    request.layers.push_back({layer.layer, layer.image});
  }
  absl::Status status = engine_.MountLayers(request).status();
  if (!absl::IsAlreadyExists(status)) return status;
  // By others unmounted, and the engine was not told yet.
  engine_.ForgetGoneMounts();
  return engine_.MountLayers(request).status();
}

void LayerMounts::UnmountIdle(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = now + std::chrono::hours(1);
    std::shared_ptr<Entry> idle;
    for (const auto& [path, entry] : entries_) {
      if (entry->users > 0) continue;
      const Clock::time_point due = entry->idle_since + idle_;
      if (due <= now) idle = entry;
      next = std::min(next, due);
    }
    if (idle == nullptr) {
      released_ = false;
      wake_.wait_until(lock, stop, next, [this] { return released_; });
      continue;
    }
    std::unique_lock busy(idle->mutex, std::try_to_lock);
    if (!busy.owns_lock()) {
      idle->idle_since = now;
      continue;
    }
    // The engine may be busy with a mount. Whoever begins to use it meanwhile waits to mount it again.
    lock.unlock();
    absl::Status status = engine_.Unmount(idle->path);
    const bool gone = status.ok() || absl::IsNotFound(status);
    if (gone) {
      ::rmdir(idle->path.c_str());
    } else {
      spdlog::warn("idle layers stay mounted: {}", std::string(status.message()));
    }
    lock.lock();
    if (gone && idle->users == 0) {
      entries_.erase(idle->path);
    } else {
      idle->idle_since = Clock::now();
    }
  }
}

}  // namespace lamina::snapshotter
