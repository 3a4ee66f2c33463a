// SPDX-License-Identifier: Apache-2.0
//
// The engine of a node: everything that must live as long as a mount does. It owns a state
// directory, attaches the blobs of images, keeps their merged metadata, mounts them and counts what
// their readers cause. One engine at a time has a state directory.
//
// With a holder of descriptors, mounts outlive the engine: one that is killed, or handed over, is
// followed by one that serves the same mounts. Their readers wait meanwhile.
//
//   <state>/lock              held (flock) for as long as the engine lives
//   <state>/control.sock      see server.h
//   <state>/blobs/ index/     chunkstore's
//   <state>/images/           see image_cache.h
//   <state>/mounts/image-<n>  an image mounted once by EROFS; its mounts are made from there, so that
//                             all share the pages that are read. What changes with one of them is
//                             above it
//   <state>/mounts/<id>/      what a mount needs: upper/ and work/ (and lower/, the tree below a
//                             writable mount with FUSE); there for as long as anything uses the mount
//   <state>/mounter.lock      see mounter.h
//   <state>/fuse/             blob files for the kernel's EROFS
#ifndef LAMINA_FS_ENGINE_ENGINE_H_
#define LAMINA_FS_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"
#include "chunkstore/blob_store.h"
#include "chunkstore/registry/settings.h"
#include "chunkstore/stats.h"
#include "erofs/merge.h"
#include "fs/engine/cache_options.h"
#include "fs/engine/descriptor_holder.h"
#include "fs/engine/image_cache.h"
#include "fs/engine/prefetch_jobs.h"
#include "fs/image/profile.h"

namespace lamina::fs {

enum class Transport {
  kAuto,   // the first of the following that this machine can do
  kErofs,  // kernel EROFS on blob files served over FUSE; needs root
  kFuse,   // the whole tree over FUSE
};
absl::StatusOr<Transport> ParseTransport(std::string_view text);
std::string_view TransportName(Transport transport);

// What is fetched for a mount before it is asked for.
struct PrefetchOptions {
  bool enabled = true;
  bool fill = false;              // all of the image, while no reader waits
  uint64_t bytes_per_second = 0;  // 0: no limit
};

struct MountRequest {
  std::string image;  // "oci:DIR[:TAG]", DIR absolute, or "docker://HOST/REPOSITORY[:TAG][@DIGEST]"
  // More of them, to be put on top of it, lowest first (OpenImages in image.h).
  std::vector<std::string> layer_images;
  std::string target;  // absolute path of an existing directory
  Transport transport = Transport::kAuto;
  bool loop = false;         // EROFS through loop devices, as on kernels before 6.12
  bool writable = false;     // an overlay on top; changes are lost at unmount unless:
  std::string writable_dir;  // keeps upper/ here (implies writable); its work directory goes
  // What is written to `writable_dir` need not survive a crash of the machine: nothing waits for a disk
  // when the mount goes, nor in fsync(2). So it is without a `writable_dir`.
  bool is_volatile = false;
  registry::Settings registry;  // secrets in it stay in memory
  // Chosen at random by the client, or empty: a request that comes again with the token of a mount
  // that is there succeeds. The answer to the first may have been lost.
  std::string token;
  // Of the client, as /proc/self/ns/mnt says; empty if it does not matter. An engine that lives in
  // another one would mount where the client cannot see it.
  std::string mount_namespace;
  PrefetchOptions prefetch;
  bool record = false;  // a profile, from the first read on; such a mount shares no other's pages
};

// A layer, and the image that it is read from.
struct LayerOfImage {
  chunkstore::LayerDescriptor layer;
  std::string image;  // as in MountRequest
};

// Layers that a caller knows otherwise than by opening an image, as the snapshotter does.
struct LayersRequest {
  std::vector<LayerOfImage> layers;  // lowest first
  // One layer as overlayfs stacks it on others; else what all of them are together.
  bool keep_marks = false;
  std::string target;  // absolute path of an existing directory
  registry::Settings registry;
};

// A layer that is on the node as far as mounting it needs; its content comes when it is read.
struct AttachedLayer {
  std::shared_ptr<chunkstore::Blob> blob;
  erofs::LayerMarks marks;
};

// Of an image on top of another one.
struct MountedImage {
  std::string image;
  std::string manifest_digest;
  uint64_t layers = 0;  // that it adds
  bool operator==(const MountedImage&) const = default;
};

// What a mount is.
struct MountDescription {
  std::string id;
  std::string image;
  std::string manifest_digest;
  std::vector<MountedImage> layer_images;  // on top of it, lowest first
  std::string target;
  Transport transport = Transport::kAuto;  // the one chosen, never kAuto
  bool loop = false;
  bool writable = false;
  // Of a writable mount: the upper directory of its overlayfs, and those of what it was forked from,
  // which are below and do not change, uppermost first.
  std::string upper;
  std::vector<std::string> lower_uppers;
  std::string reason;  // why this transport
  // The image's configuration (OCI, JSON), as it was when it was mounted, so that nobody has to open the
  // image for it. In what Engine::Mount() gives only: it is not kept.
  std::string config;
  // With Transport::kErofs, for machines that mount the image themselves: the files of its merged
  // metadata and of its layers in the order of the device slots, each a multiple of 2 MiB. They are
  // there as long as the mount is, and all who map a layer's file share its pages.
  std::vector<std::string> devices;
};

struct ForkRequest {
  std::string target;  // of a writable mount
  uint64_t count = 1;
  std::string token;            // as in MountRequest
  std::string mount_namespace;  // likewise
};

// What a mount's readers caused, for people and programs. Mounts of an image by EROFS share what is
// read, so what is counted is counted for all of them.
struct MountReport {
  MountDescription mount;
  uint64_t sharing = 1;  // mounts that this is counted for
  uint64_t layers = 0;
  uint64_t frames = 0;          // of all layers
  uint64_t frames_present = 0;  // on the local disk
  std::shared_ptr<const chunkstore::ReadStats> stats;
  // What was fetched for it before it was asked for; null if that is off.
  std::shared_ptr<const chunkstore::ReadStats> prefetch_stats;
};

// The same for an image, of all its mounts that the engine had as long as there was one.
struct ImageReport {
  std::string image;
  uint64_t mounts = 0;  // some may be detached
  uint64_t frames = 0;
  uint64_t frames_present = 0;
  std::shared_ptr<const chunkstore::ReadStats> stats;
};

struct EngineOptions {
  std::string state;  // directory, made if missing, mode 0700
  CacheOptions cache;
  // Keeps descriptors for the next engine; null: mounts end with the engine. Of what it has from the
  // one before, the engine takes "lock" (instead of locking <state>/lock) and all whose name starts
  // with "fuse".
  std::shared_ptr<DescriptorHolder> holder;
};

// Where an engine that runs in the background logs, in its state directory.
inline constexpr std::string_view kEngineLog = "engine.log";

// Makes the state directory if it is missing. kFailedPrecondition if there is one that is neither
// empty nor an engine's, so that a slip of the hand does not fill someone's directory.
absl::Status PrepareStateDirectory(const std::string& state);
// Prepares the directory and takes its lock, which goes with the descriptor. kUnavailable if another
// engine, or a holder for one, has it.
absl::StatusOr<UniqueFd> LockStateDirectory(const std::string& state);

// Thread-safe.
class Engine {
 public:
  // Takes the state directory. kUnavailable if another engine has it. Serves the mounts whose
  // descriptors the holder has, from what is on the node; nothing here waits for an origin. What
  // else an engine left mounted is unmounted: its readers get errors already. Forks (mounter.h):
  // call it before threads are started.
  static absl::StatusOr<std::unique_ptr<Engine>> Open(const EngineOptions& options);
  // Unmounts what is still mounted; busy mounts are detached. After HandOver() mounts stay.
  virtual ~Engine() = default;

  // Requests to registries that are under way, and all later ones, fail. For an engine that is about to
  // end: neither it nor who is being answered waits for servers that do not answer.
  virtual void StopRequests() = 0;

  // Has the engine end without unmounting: what was asked of it is answered, what comes then waits
  // for the next engine. With a holder only.
  virtual void HandOver() = 0;

  virtual absl::StatusOr<MountDescription> Mount(const MountRequest& request) = 0;
  // Mounts layers, and serves them for as long as any other mount.
  virtual absl::StatusOr<MountDescription> MountLayers(const LayersRequest& request) = 0;
  // Writable mounts that start from what is in another one, and have nothing to do with it from then
  // on. Their mount points are in the state directory, and go with them. All, or none after an error.
  //
  // What was written to the source is copied once, for all of them: by reference where the file system
  // can, and it becomes a layer below each. It cannot be that without a copy, because the source goes
  // on writing there, which overlayfs allows for an upper directory only. Whoever writes to the source
  // meanwhile must be stopped, or the copy has some of it and some not.
  virtual absl::StatusOr<std::vector<MountDescription>> Fork(const ForkRequest& request) = 0;
  // OpenImage of image.h, with the engine's connections.
  virtual absl::StatusOr<Image> OpenImage(const std::string& image,
                                          const registry::Settings& settings) = 0;
  // Fetches and checks what mounting an image's layers needs, and notes that the node has the image.
  // They stay attached as long as their blobs are held, which must not outlive the engine. The lowest
  // one has marks only if the image is to lie on others. Errors name the layer.
  virtual std::vector<absl::StatusOr<AttachedLayer>> AttachLayers(const Image& image,
                                                                  bool on_others) = 0;
  // Fetches what a start of the image will read, as a mount of it would, for as long as the ticket
  // lives; that must not outlive the engine. `blobs` are those of its layers, lowest first.
  virtual std::unique_ptr<Prefetcher::Ticket> PrefetchStart(
      const Image& image, std::vector<std::shared_ptr<chunkstore::Blob>> blobs) = 0;
  // Unmounts `target` and forgets it. kNotFound if no mount of this engine is there,
  // kFailedPrecondition if it is in use. A mount that a killed engine left there counts as found.
  virtual absl::Status Unmount(const std::string& target) = 0;
  // All mounts, or the one at `target` (kNotFound if there is none).
  virtual absl::StatusOr<std::vector<MountReport>> Report(
      const std::optional<std::string>& target) = 0;

  // The images that this node keeps content of. Lives as long as the engine.
  virtual ImageCache& images() = 0;
  // Pins an image, or no longer: pinned content is not evicted. `registry` is for finding out which
  // image a name stands for.
  virtual absl::Status PinImage(const std::string& image, bool pinned,
                                const registry::Settings& registry) = 0;

  // One for each image that has a mount. What they count never goes back while they are there.
  virtual std::vector<ImageReport> ReportImages() = 0;
  // Records which frames the readers of a mount, and of those that share its image, touch first.
  // kNotFound if no image is mounted at `target`, kFailedPrecondition if a recording runs, or for Stop
  // none of this mount.
  virtual absl::Status StartRecording(const std::string& target) = 0;
  virtual absl::StatusOr<Profile> StopRecording(const std::string& target) = 0;

  // Images that are fetched without a mount.
  virtual PrefetchJobs& prefetch_jobs() = 0;

  // Forgets mounts that were unmounted without asking the engine, with umount(8) for example. Call
  // it when /proc/self/mountinfo has changed.
  virtual void ForgetGoneMounts() = 0;
  virtual bool HasMounts() = 0;
  // True if there are mounts that are gone by name but have readers; ForgetGoneMounts() lets go of
  // those that have not any more.
  virtual bool HasDetachedMounts() = 0;
  // True if nothing needs the engine: no mounts, no reader of one that was detached, and no prefetch
  // jobs.
  virtual bool Idle() = 0;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_ENGINE_H_
