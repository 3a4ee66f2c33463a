// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/engine.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "chunkstore/base/remove_tree.h"
#include "fs/engine/attach.h"
#include "fs/engine/engine_impl.h"
#include "fs/engine/messages.h"
#include "fs/engine/socket.h"
#include "fs/engine/start_plan.h"
#include "fs/image/image.h"

namespace lamina::fs {
namespace {

using chunkstore::ReadStats;

// overlayfs' work directory beside upper/, in a directory that is the user's: by a name that nobody
// else gives.
constexpr char kWorkDirectory[] = ".lamina-work";

constexpr std::string_view kLockFile = "lock";

// How long a mount waits for the image's profile once all else is ready.
constexpr std::chrono::milliseconds kProfilePatience(300);

absl::Status MakeDirectory(const std::string& path, mode_t mode) {
  if (::mkdir(path.c_str(), mode) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "create directory " + path);
  }
  return absl::OkStatus();
}

bool HasNul(const std::string& text) { return text.find('\0') != std::string::npos; }

}  // namespace

absl::StatusOr<UniqueFd> LockWritableDirectory(const std::string& path) {
  ASSIGN_OR_RETURN(UniqueFd lock, OpenFile(path, O_RDONLY | O_DIRECTORY));
  ASSIGN_OR_RETURN(const bool locked, TryLock(lock.get()), "lock {}", path);
  if (locked) return lock;
  return absl::FailedPreconditionError(
      fmt::format("{} is the writable directory of another mount", path));
}

// Counts up from what is there, so that numbers stay short and are not used twice.
uint64_t NextNumber(const std::string& state, std::string_view prefix) {
  static_assert(sizeof(unsigned long) == sizeof(uint64_t));
  uint64_t next = 1;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(state + "/mounts", ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(prefix)) continue;
    next = std::max(next, std::strtoul(name.c_str() + prefix.size(), nullptr, 10) + 1);
  }
  return next;
}

std::string NextMountId(const std::string& state) { return std::to_string(NextNumber(state, "")); }

void RemoveOurs(const std::string& path) {
  if (const absl::Status status = RemoveTree(path); !status.ok()) {
    spdlog::warn("{}", std::string(status.message()));
  }
}

std::string DescriptorName(const MountRecord& record) {
  return fmt::format("{}-{}", kBlobFsRecord, record.description.id);
}

MountPaths::MountPaths(const std::string& state, const std::string& id,
                       const std::string& writable_dir)
    : directory(fmt::format("{}/mounts/{}", state, id)),
      lower(directory + "/lower"),
      own_target(directory + "/root") {
  const std::string& parent = writable_dir.empty() ? directory : writable_dir;
  upper = parent + "/upper";
  work = writable_dir.empty() ? parent + "/work" : parent + "/" + kWorkDirectory;
}

EngineImpl::EngineImpl(EngineOptions options, UniqueFd lock, std::unique_ptr<Mounter> mounter,
                       std::shared_ptr<chunkstore::NodeIndex> index,
                       std::unique_ptr<chunkstore::BlobStore> store)
    : state_(std::move(options.state)),
      keeps_nothing_(options.cache.none),
      holder_(std::move(options.holder)),
      lock_(std::move(lock)),
      mounter_(std::move(mounter)),
      index_(std::move(index)),
      store_(std::move(store)),
      images_(state_ + "/images", *store_),
      prefetcher_(*store_),
      prefetch_jobs_(state_ + "/images", *store_, images_, prefetcher_,
                     [this](const std::string& image, const registry::Settings& settings) {
                       return AccessFor(image, settings);
                     }) {}

EngineImpl::~EngineImpl() {
  if (!handed_over_) StopRequests();
  repair_ = std::jthread();  // ends it
  if (handed_over_) return;
  absl::StatusOr<std::vector<MountInfo>> mounted = std::vector<MountInfo>();
  if (!mounts_.empty()) mounted = ReadMountInfo();
  for (auto& [target, mount] : mounts_) {
    absl::Status status = mounted.status();
    if (status.ok()) status = UnmountParts(mount.record, /*detach=*/true, *mounted);
    if (!status.ok()) {
      spdlog::error("{}", std::string(status.message()));
    }
    detached_.push_back(std::move(mount));
  }
  mounts_.clear();
  for (const MountState& mount : detached_) Release(*mount.served);
  if (blob_fs_ != nullptr) StopBlobFs();
  for (MountState& mount : detached_) {
    mount.served->tree.reset();
    if (mount.is_erofs()) ::rmdir(ServedImagePath(state_, mount.served->number).c_str());
    Forget(mount.record);
  }
  detached_.clear();
}

void EngineImpl::StopRequests() {
  std::lock_guard lock(http_mutex_);
  requests_stopped_ = true;
  if (http_ != nullptr) http_->Stop();
}

void EngineImpl::HandOver() {
  std::lock_guard lock(mutex_);
  SweepDetached();
  if (mounts_.empty() && detached_.empty()) return;  // then this is the end, and leaves nothing
  handed_over_ = true;
  const auto keep_copies = [](const MountState& mount) {
    for (const auto& copy : mount.copies) copy->Keep();
  };
  for (const auto& [target, mount] : mounts_) keep_copies(mount);
  for (const MountState& mount : detached_) keep_copies(mount);
  if (blob_fs_ != nullptr) blob_fs_->LeaveMounted();
  const auto leave_mounted = [](const MountState& mount) {
    if (mount.served->tree != nullptr) mount.served->tree->LeaveMounted();
  };
  for (const auto& [target, mount] : mounts_) leave_mounted(mount);
  for (const MountState& mount : detached_) leave_mounted(mount);
}

bool EngineImpl::HasMounts() {
  std::lock_guard lock(mutex_);
  return !mounts_.empty();
}

bool EngineImpl::HasDetachedMounts() {
  std::lock_guard lock(mutex_);
  return !detached_.empty();
}

absl::Status EngineImpl::PinImage(const std::string& image, bool pinned,
                                  const registry::Settings& registry) {
  // What a tag says now, if it can be found out: another image may have been there when it was used.
  if (pinned && !image.starts_with("sha256:")) {
    const absl::StatusOr<Image> opened = OpenImage(image, registry);
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
  // Found out by a mount of its own, and always the same in one place of one kernel.
  std::call_once(probe_, [this] { from_file_ = CanMountErofsFromFile(state_ + "/images"); });
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
  return MountPrepared(request, std::move(mount));
}

absl::StatusOr<MountDescription> EngineImpl::MountPrepared(const MountRequest& request,
                                                           MountState mount) {
  std::lock_guard lock(mutex_);
  return MountLocked(request, std::move(mount));
}

absl::StatusOr<MountDescription> EngineImpl::MountLocked(const MountRequest& request,
                                                         MountState mount) {
  if (const auto there = mounts_.find(request.target); there != mounts_.end()) {
    const MountRecord& record = there->second.record;
    if (!request.token.empty() && request.token == record.token) {
      MountDescription description = record.description;
      if (mount.image.has_value()) description.config = mount.image->config_json;
      return description;
    }
    return absl::AlreadyExistsError(
        fmt::format("mount {}: {} has a mount already", request.image, request.target));
  }
  mount.record.description.id = NextMountId(state_);
  if (mount.record.description.writable) {
    mount.record.description.upper =
        MountPaths(state_, mount.id(), mount.record.writable_dir).upper;
  }
  cleaned_targets_.erase(request.target);
  if (mount.is_erofs()) {
    Share(mount);
    if (mount.served->number == 0) {
      mount.served->number = NextNumber(state_, kServedImagePrefix);
    }
    mount.record.served_image = mount.served->number;
  }
  // The record comes first: an engine that starts after a crash finds all there may be to clean.
  absl::Status status = Put(mount.record);
  if (status.ok()) status = Assemble(request, mount);
  if (status.ok()) {
    mount.record.phase = MountRecord::Phase::kMounted;
    status = Put(mount.record);
  }
  if (!status.ok()) {
    UnmountParts(mount.record, /*detach=*/true).IgnoreError();  // what was not mounted fails here
    Detach(std::move(mount));
    return Annotate(std::move(status), fmt::format("mount {}", request.image));
  }
  MountDescription description = mount.record.description;
  EnsurePrefetch(mount);
  if (mount.image.has_value()) description.config = std::move(mount.image->config_json);
  mount.image.reset();
  for (const auto& blob : mount.served->blobs) blob->ShareChunks();
  mounts_.emplace(request.target, std::move(mount));
  spdlog::info("mounted {} at {} by {} ({})", description.image, description.target,
               TransportName(description.transport), description.reason);
  return description;
}

absl::Status EngineImpl::CheckRequest(const MountRequest& request) {
  std::vector<std::string> texts = request.layer_images;
  texts.insert(texts.end(), {request.image, request.target, request.writable_dir});
  if (std::ranges::any_of(texts, HasNul)) {
    return absl::InvalidArgumentError("a path has a NUL character");
  }
  if (!request.target.starts_with('/')) {
    return absl::InvalidArgumentError(
        fmt::format("the mount point is not an absolute path: '{}'", request.target));
  }
  if (!request.mount_namespace.empty() && request.mount_namespace != MountNamespace()) {
    return absl::FailedPreconditionError(fmt::format(
        "the engine of {} (process {}) is in another mount namespace, and would mount where "
        "this one cannot see it: use another --state",
        state_, ::getpid()));
  }
  return absl::OkStatus();
}

absl::StatusOr<MountState> EngineImpl::Prepare(const MountRequest& request) {
  RETURN_IF_ERROR(CheckRequest(request));
  ASSIGN_OR_RETURN(const Choice choice, ChooseTransport(request));
  MountState mount;
  mount.record.writable_dir = request.writable_dir;
  mount.record.token = request.token;
  mount.record.registry = request.registry;
  mount.record.prefetch = request.prefetch;
  mount.record.description = {.image = request.image,
                              .target = request.target,
                              .transport = choice.transport,
                              .loop = choice.loop,
                              .writable = request.writable || !request.writable_dir.empty(),
                              .reason = choice.reason};
  if (mount.record.description.writable && ::geteuid() != 0) {
    return absl::FailedPreconditionError("a writable mount needs root (overlayfs)");
  }
  if (!request.writable_dir.empty()) {
    ASSIGN_OR_RETURN(mount.writable_lock, LockWritableDirectory(request.writable_dir));
  }
  ASSIGN_OR_RETURN(const std::vector<Image> images, OpenImagesOf(request));
  MountDescription& description = mount.record.description;
  description.manifest_digest = images[0].manifest_digest.ToString();
  for (size_t i = 1; i < images.size(); ++i) {
    description.layer_images.push_back({.image = images[i].reference,
                                        .manifest_digest = images[i].manifest_digest.ToString(),
                                        .layers = images[i].layers.size()});
  }
  const ImageRecord record = RecordOf(images);
  mount.image_use = images_.Use(record);
  mount.record.layers = record.layers;
  mount.served = std::make_shared<ServedImage>();
  ServedImage& served = *mount.served;
  served.stats = std::make_shared<ReadStats>();
  mount.image = images[0];
  // A profile that is recorded from the first read on is of the readers of this mount.
  bool is_shared = false;
  if (!request.record) {
    mount.record.metadata = MetadataPath(state_ + "/images", MergedMetadataName(record.layers));
    mount.record.metadata_inode = InodeOf(mount.record.metadata);
    std::lock_guard lock(mutex_);
    is_shared = FindServed(KeyToShare(mount.record)) != nullptr;
  }
  std::shared_ptr<StartPlan> plan;
  if (request.prefetch.enabled && !is_shared)
    plan = StartPrefetch(images[0], request.prefetch, served);
  ASSIGN_OR_RETURN(served.blobs, AttachAll(*store_, images));
  ASSIGN_OR_RETURN(served.metadata, GetMergedMetadata(state_ + "/images", served.blobs));
  mount.record.metadata = served.metadata->path;
  mount.record.metadata_inode = InodeOf(mount.record.metadata);
  mount.recording = request.record;
  if (request.record) {
    RETURN_IF_ERROR(served.stats->touches.Start(served.blobs));
  } else {
    served.key = KeyToShare(mount.record);
  }
  if (plan != nullptr) {
    plan->Attached(served.blobs, served.metadata);
    plan->AwaitProfile(kProfilePatience);
  }
  return mount;
}

absl::StatusOr<std::vector<Image>> EngineImpl::OpenImagesOf(const MountRequest& request) {
  std::vector<std::string> references{request.image};
  references.insert(references.end(), request.layer_images.begin(), request.layer_images.end());
  RegistryAccess access;
  for (const std::string& reference : references) {
    ASSIGN_OR_RETURN(RegistryAccess needed, AccessFor(reference, request.registry));
    if (access.client == nullptr) access = std::move(needed);
  }
  return OpenImages(references, oci::Platform::Host(), access);
}

absl::StatusOr<RegistryAccess> EngineImpl::AccessFor(const std::string& image,
                                                     const registry::Settings& settings) {
  RegistryAccess access{.settings = settings};
  if (image.starts_with("docker:")) {
    ASSIGN_OR_RETURN(access.client, HttpClient());
  }
  return access;
}

absl::StatusOr<std::shared_ptr<http::Client>> EngineImpl::HttpClient() {
  std::lock_guard lock(http_mutex_);
  if (requests_stopped_) return absl::CancelledError("the engine ends");
  if (http_ == nullptr) {
    ASSIGN_OR_RETURN(http_, http::Client::Create());
  }
  return http_;
}

absl::Status EngineImpl::Put(const MountRecord& record) {
  return index_->PutMount(record.description.id, SerializeMountRecord(record));
}

absl::Status EngineImpl::Assemble(const MountRequest& request, MountState& mount) {
  const MountPaths paths(state_, mount.id(), mount.record.writable_dir);
  MountDescription& description = mount.record.description;
  RETURN_IF_ERROR(MakeDirectory(paths.directory, 0700));
  std::string below;  // what an overlay is put on
  if (mount.is_erofs()) {
    ServedImage& served = *mount.served;
    below = ServedImagePath(state_, served.number);
    if (!HasOtherMounts(mount)) RETURN_IF_ERROR(MountServed(served, description.loop));
    description.devices = {mount.record.metadata};
    for (const auto& blob : served.blobs) {
      description.devices.push_back(BlobFs::SharedPath(blob_fs_->mountpoint(), blob->descriptor()));
    }
    if (!description.writable) RETURN_IF_ERROR(mounter_->ShareErofs(below, request.target));
  } else {
    below = paths.lower;
    if (description.writable) RETURN_IF_ERROR(MakeDirectory(below, 0755));
    RETURN_IF_ERROR(StartTreeAt(description.writable ? below : request.target, mount));
  }
  if (description.writable) {
    RETURN_IF_ERROR(MakeDirectory(paths.work, 0755));
    if (request.target == paths.own_target) RETURN_IF_ERROR(MakeDirectory(request.target, 0755));
    std::vector<std::string> lowers = description.lower_uppers;
    lowers.push_back(below);
    const bool is_kept = !request.writable_dir.empty() && !request.is_volatile;
    RETURN_IF_ERROR(mounter_->MountOverlay({.lowers = std::move(lowers),
                                            .upper = paths.upper,
                                            .work = paths.work,
                                            .is_volatile = !is_kept},
                                           request.target));
    mount.has_overlay = mount.is_erofs();
  }
  ASSIGN_OR_RETURN(const std::optional<MountInfo> info, FindMount(request.target));
  if (!info.has_value()) {
    return absl::InternalError(request.target + " does not show up in /proc/self/mountinfo");
  }
  mount.record.kernel_id = info->id;
  WatchOverlay(mount, info->device);
  return absl::OkStatus();
}

absl::Status EngineImpl::StartTreeAt(const std::string& target, MountState& mount) {
  ServedImage& served = *mount.served;
  ASSIGN_OR_RETURN(served.tree,
                   TreeFs::Start({.mountpoint = target,
                                  .source = MountPaths(state_, mount.id(), "").directory,
                                  .metadata = served.metadata->mapping.bytes(),
                                  .blobs = served.blobs,
                                  .stats = served.stats}));
  mount.record.fuse_state = served.tree->state();
  if (holder_ == nullptr) return absl::OkStatus();
  return holder_->Store(DescriptorName(mount.record), served.tree->device());
}

// The record comes before any mount that uses the file system: without it nobody can take it over.
absl::Status EngineImpl::StartBlobFs() {
  ASSIGN_OR_RETURN(blob_fs_, BlobFs::Start(state_ + "/fuse"));
  if (holder_ == nullptr) return absl::OkStatus();
  absl::Status status = index_->PutMount(kBlobFsRecord, blob_fs_->state());
  if (status.ok()) status = holder_->Store(kBlobFsRecord, blob_fs_->device());
  if (!status.ok()) StopBlobFs();
  return status;
}

void EngineImpl::StopBlobFs() {
  blob_fs_.reset();
  if (holder_ == nullptr) return;
  holder_->Remove(kBlobFsRecord).IgnoreError();  // it has ended, or it will end with us
  index_->RemoveMount(kBlobFsRecord).IgnoreError();
}

// Unmounts from the top down. A mount that is gone already is not an error, one that is not ours is
// left alone.
absl::Status EngineImpl::UnmountParts(const MountRecord& record, bool detach) {
  ASSIGN_OR_RETURN(const std::vector<MountInfo> mounted, ReadMountInfo());
  return UnmountParts(record, detach, mounted);
}

absl::Status EngineImpl::UnmountParts(const MountRecord& record, bool detach,
                                      std::span<const MountInfo> mounted) {
  const std::string& target = record.description.target;
  const std::optional<MountInfo> info = FindMountIn(mounted, target);
  if (info.has_value() && IsOurs(*info, record)) {
    RETURN_IF_ERROR(mounter_->Unmount(target, detach));
  } else if (info.has_value() && !detach) {
    return absl::FailedPreconditionError(
        fmt::format("{} ({}) is mounted over it: unmount that first", info->source, info->type));
  }
  return UnmountLower(record);
}

// The tree below an overlay; with EROFS only mounts of older versions have one. Nobody but us uses it,
// so there is nothing to wait for.
absl::Status EngineImpl::UnmountLower(const MountRecord& record) {
  if (!record.description.writable) return absl::OkStatus();
  const MountPaths paths(state_, record.description.id, record.writable_dir);
  const bool is_erofs = record.description.transport == Transport::kErofs;
  if (is_erofs && ::access(paths.lower.c_str(), F_OK) != 0 && errno == ENOENT) {
    return absl::OkStatus();
  }
  absl::Status status = mounter_->Unmount(paths.lower, /*detach=*/true);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

// Whether the mount at a target is the one that was made there: by its number in this kernel, or by
// what it is made of, for mounts of an earlier engine.
// Both where both are known, since the kernel gives the numbers of mounts that are gone to others.
bool EngineImpl::IsOurs(const MountInfo& info, const MountRecord& record) const {
  if (record.kernel_id != 0 && info.id != record.kernel_id) return false;
  // What is longer than mount options may be was named by a descriptor (fs_context.h).
  const bool by_descriptor =
      record.kernel_id != 0 && (info.source.starts_with("/proc/self/fd/") ||
                                info.super_options.find("/proc/self/fd/") != std::string::npos);
  if (by_descriptor) return true;
  const MountPaths paths(state_, record.description.id, record.writable_dir);
  if (info.type == "overlay") return info.super_options.find(paths.upper) != std::string::npos;
  if (info.type != "erofs") return info.source == paths.directory;
  return info.source.starts_with(state_ + "/") ||
         LoopBackingFile(info.source).value_or("").starts_with(state_ + "/");
}

void EngineImpl::Forget(const MountRecord& record) {
  const std::string& id = record.description.id;
  if (holder_ != nullptr && record.description.transport == Transport::kFuse) {
    holder_->Remove(DescriptorName(record)).IgnoreError();  // the connection has ended
  }
  RemoveOurs(MountPaths(state_, id, "").directory);
  if (!record.writable_dir.empty()) RemoveOurs(record.writable_dir + "/" + kWorkDirectory);
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
  RETURN_IF_ERROR(UnmountParts(found->second.record, /*detach=*/false), "unmount {}", target);
  MountState mount = std::move(found->second);
  mounts_.erase(found);
  spdlog::info("unmounted {} from {}", mount.record.description.image, target);
  Detach(std::move(mount));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<MountReport>> EngineImpl::Report(
    const std::optional<std::string>& target) {
  std::lock_guard lock(mutex_);
  std::vector<MountReport> reports;
  std::map<const ServedImage*, uint64_t> sharing;
  for (const auto& [path, mount] : mounts_) ++sharing[mount.served.get()];
  for (const auto& [path, mount] : mounts_) {
    if (target.has_value() && path != *target) continue;
    const ServedImage& served = *mount.served;
    MountReport report{.mount = mount.record.description, .layers = served.blobs.size()};
    for (const auto& blob : served.blobs) {
      report.frames += blob->frames().size();
      report.frames_present += blob->present_frames();
    }
    report.sharing = sharing[&served];
    report.stats = served.stats;
    report.prefetch_stats = served.prefetch_stats;
    reports.push_back(std::move(report));
  }
  if (target.has_value() && reports.empty()) {
    return absl::NotFoundError(fmt::format("no image is mounted at {}", *target));
  }
  return reports;
}

std::vector<ImageReport> EngineImpl::ReportImages() {
  struct Sum {
    ImageReport report;
    std::shared_ptr<ReadStats> stats = std::make_shared<ReadStats>();
  };
  std::map<std::string, Sum> sums;
  std::set<const ServedImage*> counted;
  std::lock_guard lock(mutex_);
  const auto add = [&](const MountState& mount) {
    Sum& sum = sums[mount.record.description.image];
    if (counted.insert(mount.served.get()).second) mount.served->stats->AddTo(*sum.stats);
    if (sum.report.mounts++ > 0) return;
    for (const auto& blob : mount.served->blobs) {
      sum.report.frames += blob->frames().size();
      sum.report.frames_present += blob->present_frames();
    }
  };
  for (const auto& [target, mount] : mounts_) add(mount);
  for (const MountState& mount : detached_) add(mount);
  std::erase_if(past_stats_, [&sums](const auto& past) { return !sums.contains(past.first); });
  std::vector<ImageReport> reports;
  for (auto& [image, sum] : sums) {
    if (const auto past = past_stats_.find(image); past != past_stats_.end()) {
      past->second->AddTo(*sum.stats);
    }
    sum.report.image = image;
    sum.report.stats = std::move(sum.stats);
    reports.push_back(std::move(sum.report));
  }
  return reports;
}

void EngineImpl::ForgetGoneMounts() {
  std::lock_guard lock(mutex_);
  ForgetGone();
}

void EngineImpl::ForgetGone() {
  SweepDetached();
  const absl::StatusOr<std::vector<MountInfo>> mounted = ReadMountInfo();
  if (!mounted.ok()) {
    spdlog::error("{}", std::string(mounted.status().message()));
    return;
  }
  std::set<uint64_t> ids;
  for (const MountInfo& info : *mounted) ids.insert(info.id);
  for (auto it = mounts_.begin(); it != mounts_.end();) {
    if (ids.contains(it->second.record.kernel_id)) {
      ++it;
      continue;
    }
    MountState mount = std::move(it->second);
    it = mounts_.erase(it);
    spdlog::info("{} was unmounted from {}", mount.record.description.image, mount.target());
    if (const absl::Status status = UnmountLower(mount.record); !status.ok()) {
      spdlog::error("{}", std::string(status.message()));
    }
    Detach(std::move(mount));
  }
}

bool EngineImpl::Idle() {
  std::lock_guard lock(mutex_);
  SweepDetached();
  return mounts_.empty() && detached_.empty() && prefetch_jobs_.Idle();
}

namespace {

// What is to be fetched for it from now on; what was fetched before stays counted.
Prefetcher::Work PrefetchWork(ServedImage& served, const PrefetchOptions& options) {
  served.prefetch_options = options;
  if (served.prefetch_stats == nullptr) served.prefetch_stats = std::make_shared<ReadStats>();
  return {.blobs = served.blobs,
          .rest = options.fill ? Prefetcher::Work::Rest::kWhenIdle : Prefetcher::Work::Rest::kLeave,
          .bytes_per_second = options.bytes_per_second,
          .stats = served.prefetch_stats,
          .readers = served.stats};
}

}  // namespace

std::shared_ptr<StartPlan> EngineImpl::StartPrefetch(Image image, const PrefetchOptions& options,
                                                     ServedImage& served) {
  auto plan = std::make_shared<StartPlan>(std::move(image));
  served.prefetch = prefetcher_.Start(
      PrefetchWork(served, options),
      [plan](const std::stop_token& stop, Prefetcher::Work& work) { plan->Make(stop, work); });
  return plan;
}

void EngineImpl::EnsurePrefetch(const MountState& mount) {
  const PrefetchOptions& wanted = mount.record.prefetch;
  ServedImage& served = *mount.served;
  const PrefetchOptions has = served.prefetch_options;
  if (!wanted.enabled || served.blobs.empty()) return;
  if (has.enabled && (has.fill || !wanted.fill)) return;
  served.prefetch = nullptr;  // one at a time watches the readers
  if (!has.enabled && mount.image.has_value()) {
    StartPrefetch(*mount.image, wanted, served)->Attached(served.blobs, served.metadata);
  } else {
    served.prefetch = prefetcher_.Start(PrefetchWork(served, wanted));
  }
}

absl::Status EngineImpl::StartRecording(const std::string& target) {
  std::lock_guard lock(mutex_);
  const auto found = mounts_.find(target);
  if (found == mounts_.end()) {
    return absl::NotFoundError(fmt::format("no image is mounted at {}", target));
  }
  MountState& mount = found->second;
  RETURN_IF_ERROR(mount.served->stats->touches.Start(mount.served->blobs), "{}", target);
  mount.recording = true;
  return absl::OkStatus();
}

absl::StatusOr<Profile> EngineImpl::StopRecording(const std::string& target) {
  std::lock_guard lock(mutex_);
  const auto found = mounts_.find(target);
  if (found == mounts_.end()) {
    return absl::NotFoundError(fmt::format("no image is mounted at {}", target));
  }
  MountState& mount = found->second;
  if (!std::exchange(mount.recording, false)) {
    return absl::FailedPreconditionError(target + ": no profile is being recorded");
  }
  ASSIGN_OR_RETURN(const std::vector<chunkstore::Touch> touches,
                   mount.served->stats->touches.Stop(), "{}", target);
  ASSIGN_OR_RETURN(const Digest image, Digest::Parse(mount.record.description.manifest_digest));
  return MakeProfile(image, mount.served->blobs, touches);
}

absl::Status PrepareStateDirectory(const std::string& state) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(state).parent_path(), error);
  if (error) return ErrnoStatus(error.value(), "create the parent of " + state);
  if (::mkdir(state.c_str(), 0700) == 0) return absl::OkStatus();
  if (errno != EEXIST) return ErrnoStatus(errno, "create state directory " + state);
  bool empty = true;
  for (std::filesystem::directory_iterator entry(state, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (name == kLockFile) return absl::OkStatus();
    // An engine may fail before it has a lock; systemd may have made its socket; a file system of its
    // own may have been made for it; a launcher makes room for a sandbox before it mounts the first one.
    constexpr std::string_view kEarlier[] = {kEngineLog, kControlSocket, "lost+found", "sandboxes"};
    if (std::ranges::find(kEarlier, std::string_view(name)) == std::end(kEarlier)) empty = false;
  }
  if (error) return ErrnoStatus(error.value(), "state directory " + state);
  if (empty) return absl::OkStatus();
  return absl::FailedPreconditionError(
      fmt::format("{} is neither empty nor a state directory of Lamina", state));
}

absl::StatusOr<UniqueFd> LockStateDirectory(const std::string& state) {
  RETURN_IF_ERROR(PrepareStateDirectory(state));
  ASSIGN_OR_RETURN(UniqueFd lock,
                   OpenFile(fmt::format("{}/{}", state, kLockFile), O_RDWR | O_CREAT, 0600));
  ASSIGN_OR_RETURN(const bool locked, TryLock(lock.get()), "lock {}/lock", state);
  if (locked) return lock;
  return absl::UnavailableError(
      fmt::format("state directory {} is in use by another engine", state));
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Open(const EngineOptions& options) {
  const std::string& state = options.state;
  UniqueFd lock;
  if (options.holder != nullptr) lock = options.holder->Take("lock");
  if (!lock.valid()) {
    ASSIGN_OR_RETURN(lock, LockStateDirectory(state));
  }
  for (const char* name : {"blobs", "index", "images", "mounts", "fuse"}) {
    const std::string path = fmt::format("{}/{}", state, name);
    absl::Status status = MakeDirectory(path, 0700);
    // A killed engine's FUSE mount point gives ENOTCONN; it is unmounted below.
    if (!status.ok() && name != std::string_view("fuse")) return status;
  }
  ASSIGN_OR_RETURN(auto mounter, Mounter::Start(state + "/mounter.lock"));
  const std::shared_ptr<chunkstore::NodeIndex> index =
      chunkstore::NodeIndex::OpenInBackground(state + "/index");
  ASSIGN_OR_RETURN(const chunkstore::CacheLimits limits, LimitsFor(options.cache, state));
  ASSIGN_OR_RETURN(auto store, chunkstore::BlobStore::Open({.directory = state + "/blobs",
                                                            .index = index,
                                                            .limits = limits,
                                                            .in_memory = options.cache.none}));
  auto engine = std::make_unique<EngineImpl>(options, std::move(lock), std::move(mounter), index,
                                             std::move(store));
  if (absl::Status status = engine->RestoreMounts(); !status.ok()) {
    // What was taken over until then is left to the next one.
    if (options.holder != nullptr) engine->HandOver();
    return status;
  }
  return engine;
}

}  // namespace lamina::fs
