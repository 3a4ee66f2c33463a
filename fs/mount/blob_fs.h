// SPDX-License-Identifier: Apache-2.0
//
// A FUSE file system whose files are blobs' address spaces, for the kernel's EROFS to mount as
// extra devices. Files are opened with direct I/O, so that content is cached once, in EROFS. One
// file system serves any number of images: each that EROFS mounts has a directory, so that its reads
// are counted for it.
//
//   <mountpoint>/<id>/1, 2, ...     device slots of the image with that number
//   <mountpoint>/blobs/<key>        a blob that any image has, by LayerDescriptor::Key()
//
// Files in blobs/ are for machines that map them: they go through the page cache, and there is one for
// all images, so that all machines on a layer share its pages. Their reads are counted for one of the
// images.
//
// Nothing of what the kernel holds is remembered here: node ids follow from id and slot, or from the
// key, there are no file handles, and whether a file is in use is asked of the kernel. So a process that takes the
// file system over understands every request that was made of the one before it.
#ifndef LAMINA_FS_MOUNT_BLOB_FS_H_
#define LAMINA_FS_MOUNT_BLOB_FS_H_

#include <memory>
#include <string>
#include <vector>

#include "chunkstore/blob_store.h"
#include "fs/mount/fuse_fs.h"

namespace lamina::fs {

// Thread-safe.
class BlobFs : public FuseFs {
 public:
  struct Directory {
    uint64_t id = 0;                                       // at least 1, less than 2^47
    std::vector<std::shared_ptr<chunkstore::Blob>> blobs;  // slots 1, 2, ...
    std::shared_ptr<chunkstore::ReadStats> stats;          // may be null
  };

  // Mounts at `mountpoint`, an existing directory, and serves from threads of its own.
  static absl::StatusOr<std::unique_ptr<BlobFs>> Start(const std::string& mountpoint);
  // Serves what another process has mounted there. `directories` are those that it had; of those
  // that are removed only the kernel's open files are served. kUnavailable if the connection is
  // gone.
  static absl::StatusOr<std::unique_ptr<BlobFs>> TakeOver(const std::string& mountpoint,
                                                          FuseHandover handover,
                                                          std::vector<Directory> directories,
                                                          std::vector<Directory> removed);
  // Unmounts and stops. Files still open elsewhere give errors from then on, unless LeaveMounted()
  // was called.

  // Adds a directory with one file for each blob. kAlreadyExists if the id is there, or was removed
  // and is in use, or if another blob's key begins with the same 63 bits.
  virtual absl::Status Add(Directory directory) = 0;
  // Removes it; files that the kernel still has open keep working until it closes them.
  virtual void Remove(uint64_t id) = 0;
  // True if `id` is there, or was removed and the kernel still has files of it open, or files in
  // blobs/ that no other directory has: a mount that was detached has users then. Lets go of the blobs otherwise. Not to be called while a thread of
  // this process looks something up in the file system.
  virtual bool InUse(uint64_t id) = 0;

  virtual const std::string& mountpoint() const = 0;
  // The path of a blob's file in blobs/, which is there as long as a directory has the blob.
  static std::string SharedPath(const std::string& mountpoint,
                                const chunkstore::LayerDescriptor& layer);
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_BLOB_FS_H_
