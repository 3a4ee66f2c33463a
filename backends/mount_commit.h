// SPDX-License-Identifier: Apache-2.0
//
// Makes an image of what was written to a writable mount of an engine, whatever runs on it.
#ifndef LAMINA_BACKENDS_MOUNT_COMMIT_H_
#define LAMINA_BACKENDS_MOUNT_COMMIT_H_

#include <string>

#include "chunkstore/registry/settings.h"
#include "fs/engine/client.h"
#include "fs/image/commit.h"

namespace lamina::backends {

struct MountCommitOptions {
  std::string target;       // the mount point
  std::string destination;  // as CommitOptions
  registry::Settings registry;
  std::string comment;
  int level = chunkstore::kDefaultLevel;
  // Images of the mount, from the lowest on, that do not become a part of the result: it is to be put on
  // top of them.
  size_t images_left_out = 0;
  // Whether containers that run there are stopped for the moment (GroupsOnMount).
  bool pause = true;
};

// kFailedPrecondition if the mount is not writable, or `pause` is not possible.
absl::StatusOr<fs::CommitResult> CommitMount(fs::Client& client, const MountCommitOptions& options);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_MOUNT_COMMIT_H_
