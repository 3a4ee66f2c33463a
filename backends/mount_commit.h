// SPDX-License-Identifier: Apache-2.0
//
// Makes an image of what was written to a writable mount of an engine, or to a container of containerd
// that an engine is the snapshotter of.
#ifndef LAMINA_BACKENDS_MOUNT_COMMIT_H_
#define LAMINA_BACKENDS_MOUNT_COMMIT_H_

#include <string>

#include "chunkstore/registry/settings.h"
#include "fs/engine/client.h"
#include "fs/image/commit.h"

namespace lamina::backends {

struct WrittenCommitOptions {
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
absl::StatusOr<fs::CommitResult> CommitMount(fs::Client& client, const std::string& mount_point,
                                             const WrittenCommitOptions& options);

// Of a container, running or not. `name_space` is containerd's. kFailedPrecondition if the layers below
// it are not those of its image, as converted.
absl::StatusOr<fs::CommitResult> CommitContainer(fs::Client& client, const std::string& name_space,
                                                 const std::string& id,
                                                 const WrittenCommitOptions& options);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_MOUNT_COMMIT_H_
