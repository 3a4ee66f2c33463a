// SPDX-License-Identifier: Apache-2.0
//
// Makes an image of what was written on top of others: the upper directory of an overlayfs becomes one
// more converted layer. Time and bytes go with what was written.
#ifndef LAMINA_FS_IMAGE_COMMIT_H_
#define LAMINA_FS_IMAGE_COMMIT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "chunkstore/blob_writer.h"
#include "fs/image/image.h"
#include "fs/image/image_writer.h"
#include "fs/image/layer_writer.h"

namespace lamina::fs {

struct CommitOptions {
  // What the upper directory lies on, lowest first. Their layers are those of the result, below the
  // new one, and its configuration is that of the first image. With none, the result has the new layer
  // alone: it is to be put on top of others.
  std::vector<Image> images;
  std::string upper;
  // Uppers between those and this one, which nobody writes to, lowest first: of the overlayfs that this
  // one was forked from. Each is a layer of its own.
  std::vector<std::string> lower_uppers;
  bool user_xattrs = false;  // see erofs::UpperOptions
  std::string destination;   // oci:DIR[:TAG] | docker://HOST/REPOSITORY[:TAG]
  RegistryAccess access;
  std::string comment;  // for the image's history; may be empty
  int level = chunkstore::kDefaultLevel;
  int jobs = 0;  // 0: one for each processor
  // Stop whoever writes to the overlayfs, and let them go on; null if nobody does. `resume` is called
  // once for each `pause` that succeeded.
  std::function<absl::Status()> pause;
  std::function<void()> resume;
};

struct CommitResult {
  Digest manifest_digest;
  std::vector<WrittenLayer> layers;  // the new ones, lowest first: of the upper the last
  // Of the layers below, by how they came to the destination.
  uint64_t layers_there = 0;
  uint64_t layers_linked = 0;
  uint64_t layers_mounted = 0;
  uint64_t layers_copied = 0;
  uint64_t copied_bytes = 0;
  std::chrono::microseconds paused{0};  // how long writers were stopped
};

// Everything is read as it is at one moment: while writers are paused. Without `pause`, a file that
// changes while it is read is kAborted, naming it, after some attempts. The destination shows all of
// the image or nothing of it, as with Convert. kFailedPrecondition for uppers that cannot be a layer,
// and for images with as many layers as there may be.
absl::StatusOr<CommitResult> Commit(const CommitOptions& options);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_COMMIT_H_
