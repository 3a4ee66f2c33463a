// SPDX-License-Identifier: Apache-2.0
//
// What engine.cc (mounting, unmounting) and engine_restore.cc (what an engine before this one left)
// share.
#ifndef LAMINA_FS_ENGINE_ENGINE_IMPL_H_
#define LAMINA_FS_ENGINE_ENGINE_IMPL_H_

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/blob_store.h"
#include "chunkstore/http/client.h"
#include "chunkstore/node_index.h"
#include "fs/engine/engine.h"
#include "fs/engine/metadata_cache.h"
#include "fs/engine/mount_record.h"
#include "fs/engine/start_plan.h"
#include "fs/image/image.h"
#include "fs/mount/blob_fs.h"
#include "fs/mount/mount.h"
#include "fs/mount/mounter.h"
#include "fs/mount/tree_fs.h"
#include "fs/mount/unmount_watch.h"

namespace lamina::fs {

// Where a mount's parts are.
struct MountPaths {
  std::string directory;
  std::string lower;       // the FUSE tree below a writable mount
  std::string own_target;  // where it is mounted if that is not the user's business
  std::string upper;
  std::string work;

  MountPaths(const std::string& state, const std::string& id, const std::string& writable_dir);
};

// The index' record of the blob files' file system, which holds FuseFs::state() only; its
// descriptor has the same name.
inline constexpr char kBlobFsRecord[] = "fuse";

// Where the EROFS file system of an image is mounted for the engine, which mounts it from there at the
// targets of all its mounts.
std::string ServedImagePath(const std::string& state, uint64_t number);
// Names of their directories in <state>/mounts begin like this.
inline constexpr std::string_view kServedImagePrefix = "image-";
// What mounts that share an image have in common: how and from which file it is mounted, and the names
// of its images, so that what is counted is counted for one. Empty with Transport::kFuse, and if it is
// not known which file it is.
std::string KeyToShare(const MountRecord& record);
// MountRecord::metadata_inode of a file; 0 if it is not there.
uint64_t InodeOf(const std::string& path);
// st_dev of what is mounted at a path; 0 if nothing is.
dev_t MountedDevice(const std::string& path);
// A descriptor's name with the holder.
std::string DescriptorName(const MountRecord& record);
// The next number that no directory in <state>/mounts has after `prefix`, "" for the ids of mounts.
// Nobody else makes mounts between this and the making of the directory.
uint64_t NextNumber(const std::string& state, std::string_view prefix);
std::string NextMountId(const std::string& state);
// Keeps others from mounting on the same writable directory, as long as the descriptor is open.
// kFailedPrecondition if one does.
absl::StatusOr<UniqueFd> LockWritableDirectory(const std::string& path);
// Removes a directory tree of ours; what cannot be removed is logged.
void RemoveOurs(const std::string& path);

// A copy of what was written to a mount, below those that were forked from it. The directory goes with
// the object unless it is kept for another engine.
class UpperCopy {
 public:
  explicit UpperCopy(std::string directory) : directory_(std::move(directory)) {}
  UpperCopy(const UpperCopy&) = delete;
  UpperCopy& operator=(const UpperCopy&) = delete;
  ~UpperCopy() {
    if (!directory_.empty()) RemoveOurs(directory_);
  }
  std::string upper() const { return directory_ + "/upper"; }
  void Keep() { directory_.clear(); }

 private:
  std::string directory_;
};
// Names of their directories in <state>/mounts begin like this.
inline constexpr std::string_view kCopyPrefix = "copy-";

// An image as it is served: by EROFS once for all mounts of the image, so that they share its pages, or
// by a FUSE tree of the mount's own.
struct ServedImage {
  std::vector<std::shared_ptr<chunkstore::Blob>> blobs;
  std::shared_ptr<const MergedMetadata> metadata;  // null for EROFS taken over
  std::shared_ptr<chunkstore::ReadStats> stats;    // of all who read it
  PrefetchOptions prefetch_options{.enabled = false};
  std::shared_ptr<chunkstore::ReadStats> prefetch_stats;  // null: there is no prefetch
  std::unique_ptr<Prefetcher::Ticket> prefetch;

  // EROFS:
  uint64_t number = 0;  // in BlobFs, and of ServedImagePath()
  std::string key;      // KeyToShare(); empty: it is not shared, or not any more
  bool mounted = false;
  dev_t device = 0;  // of the mounted file system

  // FUSE:
  std::unique_ptr<TreeFs> tree;
  // Instead of `tree` while its blobs cannot be attached: readers wait.
  std::optional<FuseHandover> waiting;
};

struct MountState {
  MountRecord record;
  std::vector<std::shared_ptr<UpperCopy>> copies;  // of record.description.lower_uppers
  std::shared_ptr<void> image_use;                 // ImageCache's
  std::shared_ptr<ServedImage> served;             // never null
  std::optional<Image> image;  // to plan the start by; not of forks, nor after a take-over
  UniqueFd writable_lock;      // keeps other mounts away from record.writable_dir
  bool recording = false;
  // Of an overlay that was mounted on EROFS: its number in EngineImpl::watches_, or none if it is not
  // known when it ends.
  bool has_overlay = false;
  std::optional<int> watch;

  const std::string& id() const { return record.description.id; }
  const std::string& target() const { return record.description.target; }
  bool is_erofs() const { return record.description.transport == Transport::kErofs; }
};

class EngineImpl : public Engine {
 public:
  EngineImpl(EngineOptions options, UniqueFd lock, std::unique_ptr<Mounter> mounter,
             std::shared_ptr<chunkstore::NodeIndex> index,
             std::unique_ptr<chunkstore::BlobStore> store);
  ~EngineImpl() override;

  // Serves or removes what the engine before this one left. Once, first of all.
  absl::Status RestoreMounts();

  void StopRequests() override;
  void HandOver() override;
  absl::StatusOr<MountDescription> Mount(const MountRequest& request) override;
  absl::StatusOr<MountDescription> MountLayers(const LayersRequest& request) override;
  absl::StatusOr<std::vector<MountDescription>> Fork(const ForkRequest& request) override;
  absl::StatusOr<Image> OpenImage(const std::string& image,
                                  const registry::Settings& settings) override;
  std::vector<absl::StatusOr<AttachedLayer>> AttachLayers(const Image& image,
                                                          bool on_others) override;
  std::unique_ptr<Prefetcher::Ticket> PrefetchStart(
      const Image& image, std::vector<std::shared_ptr<chunkstore::Blob>> blobs) override;
  absl::Status Unmount(const std::string& target) override;
  absl::StatusOr<std::vector<MountReport>> Report(
      const std::optional<std::string>& target) override;
  ImageCache& images() override { return images_; }
  absl::Status PinImage(const std::string& image, bool pinned,
                        const registry::Settings& registry) override;
  std::vector<ImageReport> ReportImages() override;
  void ForgetGoneMounts() override;
  bool HasMounts() override;
  bool HasDetachedMounts() override;
  bool Idle() override;
  absl::Status StartRecording(const std::string& target) override;
  absl::StatusOr<Profile> StopRecording(const std::string& target) override;
  PrefetchJobs& prefetch_jobs() override { return prefetch_jobs_; }

 private:
  struct Choice {
    Transport transport;
    bool loop;
    std::string reason;
  };
  // What an engine before this one left, sorted out by what can be done about it.
  struct Leftovers {
    std::vector<MountState> erofs;
    std::vector<MountState> trees;
    std::vector<MountRecord> lost;  // nothing serves them any more
  };

  absl::StatusOr<Choice> ChooseTransport(const MountRequest& request);
  absl::StatusOr<MountState> Prepare(const MountRequest& request);
  absl::Status CheckRequest(const MountRequest& request);
  // What comes after: records, mounts and serves it.
  absl::StatusOr<MountDescription> MountPrepared(const MountRequest& request, MountState mount);
  // In engine_layers.cc.
  absl::StatusOr<MountState> PrepareLayers(const LayersRequest& request);
  std::shared_ptr<chunkstore::Origin> OriginOfLayers(const std::string& image,
                                                     const registry::Settings& settings);
  // One for all images; made when the first comes from a registry.
  absl::StatusOr<std::shared_ptr<http::Client>> HttpClient();
  absl::StatusOr<RegistryAccess> AccessFor(const std::string& image,
                                           const registry::Settings& settings);
  absl::StatusOr<std::vector<Image>> OpenImagesOf(const MountRequest& request);
  // In engine_fork.cc.
  absl::StatusOr<MountState> ForkState(const ForkRequest& request,
                                       std::vector<MountDescription>& there, std::string& upper);
  // The rest: with mutex_ held.
  absl::StatusOr<MountDescription> MountLocked(const MountRequest& request, MountState mount);
  absl::Status Assemble(const MountRequest& request, MountState& mount);
  absl::Status StartBlobFs();
  void StopBlobFs();
  absl::Status StartTreeAt(const std::string& target, MountState& mount);
  absl::Status Put(const MountRecord& record);
  absl::Status UnmountParts(const MountRecord& record, bool detach);
  // With what ReadMountInfo() said just before.
  absl::Status UnmountParts(const MountRecord& record, bool detach,
                            std::span<const MountInfo> mounted);
  absl::Status UnmountLower(const MountRecord& record);
  bool IsOurs(const MountInfo& info, const MountRecord& record) const;
  void Forget(const MountRecord& record);
  void ForgetGone();
  std::shared_ptr<StartPlan> StartPrefetch(Image image, const PrefetchOptions& options,
                                           ServedImage& served);
  // Has what serves the mount fetch what it wants, unless it does. After a take-over that is the
  // image's rest, and what its readers show: a start that was interrupted goes on by what it reads.
  void EnsurePrefetch(const MountState& mount);

  // In engine_served.cc; with mutex_ held.
  // What a mount can share, or null.
  std::shared_ptr<ServedImage> FindServed(const std::string& key);
  // Has the mount share what is there for others, if there is.
  void Share(MountState& mount);
  absl::Status MountServed(ServedImage& served, bool loop);
  void WatchOverlay(MountState& mount, dev_t device);
  // After a mount's parts are unmounted: keeps what still has users, forgets the rest.
  void Detach(MountState mount);
  void SweepDetached();
  // False if someone still uses it.
  bool TryForget(MountState& mount);
  // Whether one of the other mounts, detached ones among them, is like that.
  template <typename Predicate>
  bool AnyOther(const MountState& mount, const Predicate& matches) const;
  bool HasOtherMounts(const MountState& mount);
  bool OverlayInUse(const MountState& mount);
  bool ServedInUse(ServedImage& served);
  // Takes EROFS from its place in the state directory; what has open files goes on.
  void Release(ServedImage& served);
  void KeepStats(const MountState& mount);

  // In engine_restore.cc.
  absl::StatusOr<Leftovers> ReadRecords(std::string& blob_fs_state);
  std::shared_ptr<chunkstore::Origin> OriginOf(const std::string& image,
                                               const registry::Settings& settings);
  void RestoreCopies(MountState& mount);
  std::vector<MountState> AttachLocalBlobs(std::vector<MountState>& mounts);
  void ReleaseUnmounted();
  void WatchOverlays();
  void TakeOverErofs(std::vector<MountState> mounts, const std::string& state,
                     std::vector<MountRecord>& lost);
  void TakeOverTrees(std::vector<MountState> mounts, std::vector<MountRecord>& lost);
  absl::Status StartTree(MountState& mount, FuseHandover handover);
  void StartRepair();
  void Repair(std::stop_token stop, std::vector<std::string> ids);
  bool RepairMount(const std::string& id, bool may_wait);
  MountState* FindById(const std::string& id);
  void ReplaceDevice(const std::string& name, const FuseFs& fs);
  std::shared_ptr<void> UseImage(const MountRecord& record);
  void Adopt(MountState mount);
  absl::Status RemoveBlobFs();
  void CleanUp(const MountRecord& lost);
  void CleanUpUnrecorded();

  const std::string state_;
  const bool keeps_nothing_;                        // of content, on the disk
  const std::shared_ptr<DescriptorHolder> holder_;  // may be null
  const UniqueFd lock_;
  const std::unique_ptr<Mounter> mounter_;
  const std::shared_ptr<chunkstore::NodeIndex> index_;
  const std::unique_ptr<chunkstore::BlobStore> store_;

  std::mutex http_mutex_;
  std::shared_ptr<http::Client> http_;  // null as long as no image comes from a registry
  bool requests_stopped_ = false;

  ImageCache images_;
  Prefetcher prefetcher_;
  PrefetchJobs prefetch_jobs_;

  std::once_flag probe_;
  Capability from_file_;  // set by probe_

  // Of layers that are mounted by themselves, by image, as long as they are used.
  std::mutex origins_mutex_;
  std::map<std::string, std::weak_ptr<chunkstore::Origin>> layer_origins_;

  std::mutex mutex_;                          // guards what follows
  std::unique_ptr<BlobFs> blob_fs_;           // started by the first EROFS mount
  std::map<std::string, MountState> mounts_;  // by target
  std::set<std::string> cleaned_targets_;     // unmounted on start, not yet asked for
  std::list<MountState> detached_;            // gone by name, but they may have users left
  UnmountWatch watches_;                      // of the overlays of writable mounts
  // Of mounts that are gone, by image, while the image has others.
  std::map<std::string, std::shared_ptr<chunkstore::ReadStats>> past_stats_;
  std::map<std::string, std::shared_ptr<void>> restored_uses_;  // by manifest, while restoring
  std::map<std::string, std::shared_ptr<UpperCopy>> restored_copies_;  // by upper, likewise
  bool handed_over_ = false;
  std::jthread repair_;  // fetches tables that were damaged while no engine ran
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_ENGINE_IMPL_H_
