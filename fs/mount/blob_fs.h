// SPDX-License-Identifier: Apache-2.0
//
// A FUSE file system whose files are blobs' address spaces, for the kernel's EROFS to mount as
// extra devices. Files are opened with direct I/O, so that content is cached once, in EROFS. One
// file system serves any number of mounts: each has a directory, so that its reads are counted for
// it.
//
//   <mountpoint>/<mount id>/1, 2, ...     device slots of that mount
#ifndef LAMINA_FS_MOUNT_BLOB_FS_H_
#define LAMINA_FS_MOUNT_BLOB_FS_H_

#include <memory>
#include <string>
#include <vector>

#include "chunkstore/blob_store.h"

namespace lamina::fs {

// Thread-safe.
class BlobFs {
 public:
  // Mounts at `mountpoint`, an existing directory, and serves from threads of its own.
  static absl::StatusOr<std::unique_ptr<BlobFs>> Start(const std::string& mountpoint);
  // Unmounts and stops. Files still open elsewhere give errors from then on.
  virtual ~BlobFs() = default;

  // Adds the directory `id` with one file for each blob. kAlreadyExists if there is one.
  virtual absl::Status Add(const std::string& id,
                           std::vector<std::shared_ptr<chunkstore::Blob>> blobs,
                           std::shared_ptr<chunkstore::ReadStats> stats) = 0;
  // Removes it; files that the kernel still has open keep working until it closes them.
  virtual void Remove(const std::string& id) = 0;

  // Files of mount `id` that the kernel has open, also after Remove(id): while there are any, a
  // mount that was detached still has users.
  virtual uint64_t open_files(const std::string& id) const = 0;

  virtual const std::string& mountpoint() const = 0;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_BLOB_FS_H_
