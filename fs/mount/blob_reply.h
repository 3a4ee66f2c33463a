// SPDX-License-Identifier: Apache-2.0
//
// Answers a FUSE read request with content of blobs: at once if it is there, else when it has been
// fetched.
#ifndef LAMINA_FS_MOUNT_BLOB_REPLY_H_
#define LAMINA_FS_MOUNT_BLOB_REPLY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "chunkstore/blob_store.h"
#include "fs/mount/fuse_session.h"

namespace lamina::fs {

// A part of an answer: `length` bytes, from `offset` of a blob's data file, or if there is no blob
// from `memory`, or if that is null zeros.
struct ContentPiece {
  std::shared_ptr<chunkstore::Blob> blob;
  uint64_t offset = 0;
  uint64_t length = 0;
  const std::byte* memory = nullptr;
};

// Answers `request` with `pieces` one after the other, each inside its data file. If content must
// be fetched first it returns at once and the answer goes out from a thread of the store; if that
// fails the reader gets EIO; the store logs why.
void ReplyWithContent(fuse_req_t request, std::span<const ContentPiece> pieces,
                      const std::shared_ptr<chunkstore::ReadStats>& stats);

}  // namespace lamina::fs

#endif  // LAMINA_FS_MOUNT_BLOB_REPLY_H_
