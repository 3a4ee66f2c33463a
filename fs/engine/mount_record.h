// SPDX-License-Identifier: Apache-2.0
//
// What the node's index remembers of a mount: enough for another process to serve it, without the
// image's origin, or to remove what is left of it.
#ifndef LAMINA_FS_ENGINE_MOUNT_RECORD_H_
#define LAMINA_FS_ENGINE_MOUNT_RECORD_H_

#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/blob_tables.h"
#include "fs/engine/engine.h"

namespace lamina::fs {

struct MountRecord {
  enum class Phase {
    kMounting,  // begun: nobody was told that it is there
    kMounted,
    kDetached,  // unmounted; the kernel may still have files of it open
  };
  Phase phase = Phase::kMounting;
  MountDescription description;
  std::string writable_dir;
  std::string token;            // of the request
  registry::Settings registry;  // of the request, without secrets: those are in no file of ours
  PrefetchOptions prefetch;     // of the request
  std::vector<chunkstore::LayerDescriptor> layers;  // of all its images, lowest first
  // With Transport::kErofs: ServedImage::number, and the inode number of the metadata file, which may
  // be replaced while it is mounted. 0 in records of versions that shared nothing.
  static constexpr uint64_t kMaxServedImage = (uint64_t{1} << 47) - 1;  // as BlobFs wants it
  uint64_t served_image = 0;
  uint64_t metadata_inode = 0;
  // From here on: not while kMounting.
  uint64_t kernel_id = 0;  // of the mount at the target, in mountinfo
  std::string metadata;    // path of the merged metadata that the kernel's inode numbers are from
  std::string fuse_state;  // with Transport::kFuse: FuseFs::state()
};

// The image that each of the layers is of.
std::vector<std::string> ImagesOfLayers(const MountRecord& record);

std::string SerializeMountRecord(const MountRecord& record);
// kDataLoss if it is not understood.
absl::StatusOr<MountRecord> ParseMountRecord(std::string_view text);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_MOUNT_RECORD_H_
