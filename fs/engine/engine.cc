// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/engine.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "chunkstore/blob_store.h"
#include "chunkstore/http/client.h"
#include "chunkstore/node_index.h"
#include "fs/engine/messages.h"
#include "fs/engine/metadata_cache.h"
#include "fs/image/image.h"
#include "fs/mount/blob_fs.h"
#include "fs/mount/mount.h"
#include "fs/mount/tree_fs.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::ReadStats;

// Layers that are attached at the same time.
constexpr size_t kAttachThreads = 8;

absl::Status MakeDirectory(const std::string& path, mode_t mode) {
  if (::mkdir(path.c_str(), mode) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "create directory " + path);
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> LockState(const std::string& state) {
  ASSIGN_OR_RETURN(UniqueFd lock, OpenFile(state + "/lock", O_RDWR | O_CREAT, 0600));
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) return lock;
  if (errno == EWOULDBLOCK) {
    return absl::UnavailableError(
        fmt::format("state directory {} is in use by another engine", state));
  }
  return ErrnoStatus(errno, fmt::format("lock {}/lock", state));
}

// Removes a directory tree of ours; what cannot be removed is logged, never followed into a mount.
void RemoveTree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) spdlog::warn("remove {}: {}", path, error.message());
}

// Where a mount's parts are.
struct Paths {
  std::string directory;
  std::string lower;  // EROFS below a writable mount
  std::string upper;
  std::string work;

  Paths(const std::string& state, const std::string& id, const std::string& writable_dir)
      : directory(fmt::format("{}/mounts/{}", state, id)), lower(directory + "/lower") {
    const std::string& parent = writable_dir.empty() ? directory : writable_dir;
    upper = parent + "/upper";
    work = parent + "/work";
  }
};

// Makes the upper directory of an overlay, if it is not there from an earlier mount. It gets the
// attributes of the image's root, because overlayfs shows its own for the root of the merged tree.
absl::Status MakeUpper(const Paths& paths) {
  if (::mkdir(paths.upper.c_str(), 0700) != 0) {
    if (errno == EEXIST) return absl::OkStatus();
    return ErrnoStatus(errno, "create directory " + paths.upper);
  }
  struct stat root {};
  if (::stat(paths.lower.c_str(), &root) != 0 ||
      ::chown(paths.upper.c_str(), root.st_uid, root.st_gid) != 0 ||
      ::chmod(paths.upper.c_str(), root.st_mode & 07777) != 0) {
    return ErrnoStatus(errno,
                       fmt::format("give {} the attributes of the image's root", paths.upper));
  }
  const timespec modified[2] = {{.tv_sec = 0, .tv_nsec = UTIME_OMIT}, root.st_mtim};
  if (::utimensat(AT_FDCWD, paths.upper.c_str(), modified, 0) != 0) {
    return ErrnoStatus(errno, "set the time of " + paths.upper);
  }
  return absl::OkStatus();
}

// Counts up from what is there, so that ids stay short and are not used twice.
std::string NextId(const std::string& state) {
  static_assert(sizeof(unsigned long) == 8);
  unsigned long next = 1;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(state + "/mounts", ignored)) {
    next = std::max(next, std::strtoul(entry.path().filename().c_str(), nullptr, 10) + 1);
  }
  return std::to_string(next);
}

struct MountState {
  MountDescription description;
  std::string writable_dir;
  std::shared_ptr<void> image_use;
  uint64_t kernel_id = 0;  // of the mount at the target, in mountinfo
  std::vector<std::shared_ptr<Blob>> blobs;
  std::shared_ptr<const MergedMetadata> metadata;
  std::shared_ptr<ReadStats> stats;
  std::unique_ptr<TreeFs> tree;  // with Transport::kFuse
};

class EngineImpl : public Engine {
 public:
  EngineImpl(std::string state, UniqueFd lock, std::shared_ptr<chunkstore::NodeIndex> index,
             std::unique_ptr<chunkstore::BlobStore> store)
      : state_(std::move(state)),
        lock_(std::move(lock)),
        index_(std::move(index)),
        store_(std::move(store)),
        images_(state_ + "/images", *store_) {}

  ~EngineImpl() override {
    for (const auto& [target, mount] : mounts_) {
      if (absl::Status status = UnmountParts(mount, /*detach=*/true); !status.ok()) {
        spdlog::error("{}", std::string(status.message()));
      }
    }
    mounts_.clear();
    blob_fs_.reset();
    detached_.clear();
  }

  absl::Status CleanUpAfterKilledEngine();

  absl::StatusOr<MountDescription> Mount(const MountRequest& request) override;
  absl::Status Unmount(const std::string& target) override;
  absl::StatusOr<std::vector<MountReport>> Report(
      const std::optional<std::string>& target) override;
  ImageCache& images() override { return images_; }
  absl::Status PinImage(const std::string& image, bool pinned) override;
  void ForgetGoneMounts() override;
  bool HasMounts() override {
    std::lock_guard lock(mutex_);
    return !mounts_.empty();
  }
  bool Idle() override;

 private:
  struct Choice {
    Transport transport;
    bool loop;
    std::string reason;
  };
  absl::StatusOr<Choice> ChooseTransport(const MountRequest& request);
  absl::StatusOr<MountState> Prepare(const MountRequest& request);
  // One for all images; made when the first comes from a registry.
  absl::StatusOr<std::shared_ptr<http::Client>> HttpClient();
  absl::Status Assemble(const MountRequest& request, MountState& mount);
  absl::Status MountErofsAt(const std::string& target, MountState& mount);
  absl::Status CleanUpRecordedMounts();
  absl::Status UnmountParts(const MountState& mount, bool detach);
  bool IsOurs(const MountInfo& info, const MountState& mount) const;
  void Forget(const MountState& mount);
  // Lets go of detached mounts whose last user has gone. With mutex_ held.
  void SweepDetached();

  const std::string state_;
  const UniqueFd lock_;
  const std::shared_ptr<chunkstore::NodeIndex> index_;
  const std::unique_ptr<chunkstore::BlobStore> store_;
  ImageCache images_;

  std::once_flag probe_;
  Capability from_file_;  // set by probe_

  std::mutex mutex_;                          // guards what follows
  std::shared_ptr<http::Client> http_;        // null as long as no image comes from a registry
  std::unique_ptr<BlobFs> blob_fs_;           // started by the first EROFS mount
  std::map<std::string, MountState> mounts_;  // by target
  std::set<std::string> cleaned_targets_;     // unmounted on start, not yet asked for
  std::vector<MountState> detached_;          // gone by name, but they may have users left
};

// Attaches the layers, several at a time: for an origin far away the round trips of many layers would
// add up.
absl::StatusOr<std::vector<std::shared_ptr<Blob>>> AttachAll(chunkstore::BlobStore& store,
                                                             const Image& image) {
  std::vector<absl::StatusOr<std::shared_ptr<Blob>>> results(image.layers.size(),
                                                             absl::UnknownError("not attached"));
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < results.size(); i = next++) {
      results[i] = store.Attach(image.layers[i], image.origin);
    }
  };
  {
    std::vector<std::jthread> helpers;  // joined at the end of the block
    for (size_t i = 1; i < std::min(results.size(), kAttachThreads); ++i)
      helpers.emplace_back(work);
    work();
  }
  std::vector<std::shared_ptr<Blob>> blobs;
  for (size_t i = 0; i < results.size(); ++i) {
    RETURN_IF_ERROR(results[i].status(), "layer {}", image.layers[i].digest.ToString());
    blobs.push_back(*std::move(results[i]));
  }
  return blobs;
}

ImageRecord RecordOf(const Image& image) {
  return {
      .image = image.reference, .manifest_digest = image.manifest_digest, .layers = image.layers};
}

absl::Status EngineImpl::PinImage(const std::string& image, bool pinned) {
  // What a tag says now, if it can be found out: another image may have been there when it was used.
  if (pinned && !image.starts_with("sha256:")) {
    const absl::StatusOr<Image> opened = OpenImage(image, oci::Platform::Host());
    if (opened.ok()) return images_.Pin(RecordOf(*opened));
    if (images_.SetPinned(image, true).ok()) return absl::OkStatus();
    return opened.status();
  }
  return images_.SetPinned(image, pinned);
}

absl::StatusOr<EngineImpl::Choice> EngineImpl::ChooseTransport(const MountRequest& request) {
  if (request.transport == Transport::kFuse) {
    if (request.loop) {
      return absl::InvalidArgumentError("loop devices go with transport erofs, not with fuse");
    }
    return Choice{Transport::kFuse, false, "asked for"};
  }
  const Capability erofs = CanMountErofs();
  // Found out by a mount of its own, and always the same in one kernel.
  std::call_once(probe_, [this] { from_file_ = CanMountErofsFromFile(); });
  if (request.transport == Transport::kErofs || request.loop) {
    if (!erofs.available) {
      return absl::FailedPreconditionError("transport erofs: " + erofs.reason);
    }
  }
  if (request.loop) return Choice{Transport::kErofs, true, "asked for, with loop devices"};
  if (erofs.available) {
    if (from_file_.available) {
      return Choice{Transport::kErofs, false,
                    request.transport == Transport::kErofs
                        ? "asked for"
                        : "root, and the kernel mounts EROFS from files"};
    }
    return Choice{Transport::kErofs, true, "loop devices, since " + from_file_.reason};
  }
  return Choice{Transport::kFuse, false, "no kernel EROFS: " + erofs.reason};
}

absl::StatusOr<MountDescription> EngineImpl::Mount(const MountRequest& request) {
  // What may take long, as reading tables from the origin, is done without the lock.
  ASSIGN_OR_RETURN(MountState mount, Prepare(request), "mount {}", request.image);

  std::lock_guard lock(mutex_);
  if (mounts_.contains(request.target)) {
    return absl::AlreadyExistsError(
        fmt::format("mount {}: {} has a mount already", request.image, request.target));
  }
  mount.description.id = NextId(state_);
  cleaned_targets_.erase(request.target);
  // The record comes first: an engine that starts after a crash finds all there may be to clean.
  nlohmann::json record = ToJson(mount.description);
  record["writable_dir"] = mount.writable_dir;
  RETURN_IF_ERROR(index_->PutMount(mount.description.id, record.dump()), "mount {}", request.image);
  if (absl::Status status = Assemble(request, mount); !status.ok()) {
    UnmountParts(mount, /*detach=*/true).IgnoreError();  // what was not mounted yet fails here
    Forget(mount);
    return Annotate(std::move(status), fmt::format("mount {}", request.image));
  }
  const MountDescription description = mount.description;
  for (const auto& blob : mount.blobs) blob->ShareChunks();
  mounts_.emplace(request.target, std::move(mount));
  spdlog::info("mounted {} at {} by {} ({})", description.image, description.target,
               TransportName(description.transport), description.reason);
  return description;
}

absl::StatusOr<MountState> EngineImpl::Prepare(const MountRequest& request) {
  ASSIGN_OR_RETURN(const Choice choice, ChooseTransport(request));
  MountState mount;
  mount.writable_dir = request.writable_dir;
  mount.description = {.image = request.image,
                       .target = request.target,
                       .transport = choice.transport,
                       .loop = choice.loop,
                       .writable = request.writable || !request.writable_dir.empty(),
                       .reason = choice.reason};
  if (mount.description.writable && ::geteuid() != 0) {
    return absl::FailedPreconditionError("a writable mount needs root (overlayfs)");
  }
  RegistryAccess access{.settings = request.registry};
  if (request.image.starts_with("docker:")) {
    ASSIGN_OR_RETURN(access.client, HttpClient());
  }
  ASSIGN_OR_RETURN(const Image image, OpenImage(request.image, oci::Platform::Host(), access));
  mount.description.manifest_digest = image.manifest_digest.ToString();
  mount.image_use = images_.Use(RecordOf(image));
  ASSIGN_OR_RETURN(mount.blobs, AttachAll(*store_, image));
  ASSIGN_OR_RETURN(mount.metadata, GetMergedMetadata(state_ + "/images", mount.blobs));
  mount.stats = std::make_shared<ReadStats>();
  return mount;
}

absl::StatusOr<std::shared_ptr<http::Client>> EngineImpl::HttpClient() {
  std::lock_guard lock(mutex_);
  if (http_ == nullptr) {
    ASSIGN_OR_RETURN(http_, http::Client::Create());
  }
  return http_;
}

absl::Status EngineImpl::Assemble(const MountRequest& request, MountState& mount) {
  const Paths paths(state_, mount.description.id, mount.writable_dir);
  RETURN_IF_ERROR(MakeDirectory(paths.directory, 0700));
  std::string image_target = request.target;
  if (mount.description.writable) {
    RETURN_IF_ERROR(MakeDirectory(paths.lower, 0755));
    RETURN_IF_ERROR(MakeDirectory(paths.work, 0755));
    image_target = paths.lower;
  }
  if (mount.description.transport == Transport::kErofs) {
    RETURN_IF_ERROR(MountErofsAt(image_target, mount));
  } else {
    ASSIGN_OR_RETURN(mount.tree, TreeFs::Start({.mountpoint = image_target,
                                                .source = paths.directory,
                                                .metadata = mount.metadata->mapping.bytes(),
                                                .blobs = mount.blobs,
                                                .stats = mount.stats}));
  }
  if (mount.description.writable) {
    RETURN_IF_ERROR(MakeUpper(paths));
    RETURN_IF_ERROR(MountOverlay({paths.lower}, paths.upper, paths.work, request.target));
  }
  ASSIGN_OR_RETURN(const std::optional<MountInfo> info, FindMount(request.target));
  if (!info.has_value()) {
    return absl::InternalError(request.target + " does not show up in /proc/self/mountinfo");
  }
  mount.kernel_id = info->id;
  return absl::OkStatus();
}

absl::Status EngineImpl::MountErofsAt(const std::string& target, MountState& mount) {
  const std::string& id = mount.description.id;
  if (blob_fs_ == nullptr) {
    ASSIGN_OR_RETURN(blob_fs_, BlobFs::Start(state_ + "/fuse"));
  }
  RETURN_IF_ERROR(blob_fs_->Add(id, mount.blobs, mount.stats));
  std::vector<std::string> devices;
  for (size_t slot = 1; slot <= mount.blobs.size(); ++slot) {
    devices.push_back(fmt::format("{}/{}/{}", blob_fs_->mountpoint(), id, slot));
  }
  return MountErofs(mount.metadata->path, devices, target, mount.description.loop);
}

// Unmounts from the top down. A mount that is gone already is not an error, one that is not ours is
// left alone.
absl::Status EngineImpl::UnmountParts(const MountState& mount, bool detach) {
  const Paths paths(state_, mount.description.id, mount.writable_dir);
  const std::string& target = mount.description.target;
  ASSIGN_OR_RETURN(const std::optional<MountInfo> info, FindMount(target));
  if (info.has_value() && IsOurs(*info, mount)) {
    RETURN_IF_ERROR(lamina::fs::Unmount(target, detach));
  } else if (info.has_value() && !detach) {
    return absl::FailedPreconditionError(
        fmt::format("{} ({}) is mounted over it: unmount that first", info->source, info->type));
  }
  if (!mount.description.writable) return absl::OkStatus();
  // Nobody but us uses what is below, so there is nothing to wait for.
  absl::Status status = lamina::fs::Unmount(paths.lower, /*detach=*/true);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

// Whether the mount at a target is the one that was made there: by its number in this kernel, or by
// what it is made of, for mounts of an earlier engine.
bool EngineImpl::IsOurs(const MountInfo& info, const MountState& mount) const {
  if (mount.kernel_id != 0) return info.id == mount.kernel_id;
  const Paths paths(state_, mount.description.id, mount.writable_dir);
  if (info.type == "overlay") return info.super_options.find(paths.lower) != std::string::npos;
  if (info.type != "erofs") return info.source == paths.directory;
  return info.source.starts_with(state_ + "/") || info.source.starts_with("/dev/loop");
}

void EngineImpl::Forget(const MountState& mount) {
  SweepDetached();
  const std::string& id = mount.description.id;
  if (blob_fs_ != nullptr) blob_fs_->Remove(id);
  RemoveTree(Paths(state_, id, "").directory);
  if (!mount.writable_dir.empty()) RemoveTree(mount.writable_dir + "/work");
  if (absl::Status status = index_->RemoveMount(id); !status.ok()) {
    spdlog::error("forget mount {}: {}", id, std::string(status.message()));
  }
}

absl::Status EngineImpl::Unmount(const std::string& target) {
  std::lock_guard lock(mutex_);
  const auto found = mounts_.find(target);
  if (found == mounts_.end()) {
    if (cleaned_targets_.erase(target) > 0) return absl::OkStatus();
    return absl::NotFoundError(fmt::format("unmount {}: no image is mounted there", target));
  }
  RETURN_IF_ERROR(UnmountParts(found->second, /*detach=*/false), "unmount {}", target);
  MountState mount = std::move(found->second);
  mounts_.erase(found);
  Forget(mount);
  spdlog::info("unmounted {} from {}", mount.description.image, target);
  detached_.push_back(std::move(mount));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<MountReport>> EngineImpl::Report(
    const std::optional<std::string>& target) {
  std::lock_guard lock(mutex_);
  std::vector<MountReport> reports;
  for (const auto& [path, mount] : mounts_) {
    if (target.has_value() && path != *target) continue;
    MountReport report{.mount = mount.description, .layers = mount.blobs.size()};
    for (const auto& blob : mount.blobs) {
      report.frames += blob->frames().size();
      report.frames_present += blob->present_frames();
    }
    report.stats = mount.stats;
    reports.push_back(std::move(report));
  }
  if (target.has_value() && reports.empty()) {
    return absl::NotFoundError(fmt::format("no image is mounted at {}", *target));
  }
  return reports;
}

void EngineImpl::ForgetGoneMounts() {
  std::lock_guard lock(mutex_);
  SweepDetached();
  const absl::StatusOr<std::vector<MountInfo>> mounted = ReadMountInfo();
  if (!mounted.ok()) {
    spdlog::error("{}", std::string(mounted.status().message()));
    return;
  }
  std::set<uint64_t> ids;
  for (const MountInfo& info : *mounted) ids.insert(info.id);
  for (auto it = mounts_.begin(); it != mounts_.end();) {
    if (ids.contains(it->second.kernel_id)) {
      ++it;
      continue;
    }
    MountState mount = std::move(it->second);
    it = mounts_.erase(it);
    spdlog::info("{} was unmounted from {}", mount.description.image, mount.description.target);
    if (mount.description.writable) {
      const Paths paths(state_, mount.description.id, mount.writable_dir);
      lamina::fs::Unmount(paths.lower, /*detach=*/true).IgnoreError();  // may be gone as well
    }
    Forget(mount);
    detached_.push_back(std::move(mount));
  }
}

bool EngineImpl::Idle() {
  std::lock_guard lock(mutex_);
  SweepDetached();
  return mounts_.empty() && detached_.empty();
}

void EngineImpl::SweepDetached() {
  std::erase_if(detached_, [this](const MountState& mount) {
    return mount.tree != nullptr ? mount.tree->ended()
                                 : blob_fs_->open_files(mount.description.id) == 0;
  });
}

absl::Status EngineImpl::CleanUpAfterKilledEngine() {
  std::vector<std::string> left;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(state_ + "/mounts", error)) {
    left.push_back(entry.path().string());
  }
  if (error) return ErrnoStatus(error.value(), fmt::format("read {}/mounts", state_));
  // Without a directory nothing was mounted, and there is no need to wait for the index.
  if (!left.empty()) RETURN_IF_ERROR(CleanUpRecordedMounts());
  for (const std::string& directory : left) {
    lamina::fs::Unmount(directory + "/lower", /*detach=*/true).IgnoreError();  // mostly gone
    RemoveTree(directory);
  }
  absl::Status status = lamina::fs::Unmount(state_ + "/fuse", /*detach=*/true);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::Status EngineImpl::CleanUpRecordedMounts() {
  ASSIGN_OR_RETURN(const auto records, index_->Mounts());
  for (const auto& [id, text] : records) {
    const nlohmann::json record = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    const absl::StatusOr<std::string> target = StringField(record, "target");
    const absl::StatusOr<std::string> writable_dir = StringField(record, "writable_dir");
    if (!target.ok() || !writable_dir.ok()) {
      spdlog::warn("mount record {} is not understood and dropped: {}", id, text);
    } else {
      spdlog::warn("{} was left mounted by an engine that was killed: unmounting it", *target);
      MountState mount;
      mount.description = {.id = id, .target = *target, .writable = true};
      mount.writable_dir = *writable_dir;
      RETURN_IF_ERROR(UnmountParts(mount, /*detach=*/true));
      cleaned_targets_.insert(*target);
      Forget(mount);
    }
    RETURN_IF_ERROR(index_->RemoveMount(id));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Open(const EngineOptions& options) {
  const std::string& state = options.state;
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(state).parent_path(), error);
  if (error) return ErrnoStatus(error.value(), "create the parent of " + state);
  RETURN_IF_ERROR(MakeDirectory(state, 0700));
  ASSIGN_OR_RETURN(UniqueFd lock, LockState(state));
  for (const char* name : {"blobs", "index", "images", "mounts", "fuse"}) {
    const std::string path = fmt::format("{}/{}", state, name);
    absl::Status status = MakeDirectory(path, 0700);
    // A killed engine's FUSE mount point gives ENOTCONN; it is unmounted below.
    if (!status.ok() && name != std::string_view("fuse")) return status;
  }
  const std::shared_ptr<chunkstore::NodeIndex> index =
      chunkstore::NodeIndex::OpenInBackground(state + "/index");
  ASSIGN_OR_RETURN(const chunkstore::CacheLimits limits, LimitsFor(options.cache, state));
  ASSIGN_OR_RETURN(auto store, chunkstore::BlobStore::Open({.directory = state + "/blobs",
                                                            .index = index,
                                                            .limits = limits,
                                                            .in_memory = options.cache.none}));
  auto engine =
      std::make_unique<EngineImpl>(state, std::move(lock), std::move(index), std::move(store));
  RETURN_IF_ERROR(engine->CleanUpAfterKilledEngine());
  return engine;
}

}  // namespace lamina::fs
