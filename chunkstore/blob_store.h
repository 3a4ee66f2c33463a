// SPDX-License-Identifier: Apache-2.0
//
// The blobs of a node: each a sparse file that is the blob's address space, filled frame by frame
// on demand. Kept in `<state>/blobs/<hex digest>/`:
//   sections   section table as in the object, checked against the descriptor on open
//   frames     decoded frame table
//   metadata   decoded EROFS metadata, padded to 2 MiB
//   chunks     decoded chunk table (comes in the background)
//   checksums  XXH3 of the three above
//   data       the address space, sparse, padded to 2 MiB
//   present    bitmap: one bit a frame, set after the frame's bytes are in `data`
//
// Crash rules. A bit is set only after the write, so a killed process loses nothing. What the disk
// made of it is never taken on trust: every process checks a frame that it finds present against
// its XXH3 when it is first used, and fetches it again if it does not match. This covers a machine
// crash, a truncated or damaged file and a restored backup with one rule, and needs no mark of a
// clean end. Damaged tables are fetched again, and the frames stay; a section table that is not
// exactly the descriptor's has everything fetched again, since nothing else says whose data it is.
#ifndef LAMINA_CHUNKSTORE_BLOB_STORE_H_
#define LAMINA_CHUNKSTORE_BLOB_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/blob_tables.h"
#include "chunkstore/node_index.h"
#include "chunkstore/origin.h"
#include "chunkstore/stats.h"

namespace lamina::chunkstore {

enum class Priority { kForeground, kPrefetch };

// An attached blob. Thread-safe. Keeps what it needs of the store alive.
class Blob {
 public:
  virtual ~Blob() = default;

  virtual const LayerDescriptor& descriptor() const = 0;
  // Bytes of the address space; the data file is this rounded up to 2 MiB.
  virtual uint64_t size() const = 0;
  virtual uint32_t blocks() const = 0;
  // EROFS metadata of the layer, verified; valid as long as the blob.
  virtual std::span<const std::byte> metadata() const = 0;
  virtual const FrameTable& frames() const = 0;
  // The data file, for reading parts that Ready() says are there.
  virtual int data_fd() const = 0;

  // True if every byte of the range is in the data file and was verified by this process. Never
  // blocks and takes no lock. The range must be inside the data file; what lies past size() is
  // zeros and always ready.
  virtual bool Ready(uint64_t offset, uint64_t length) const = 0;

  // Makes the range ready, then calls `done` once: on the caller's thread if it is ready now, else
  // on a thread of the store, which `done` must not block. Frames that are being fetched are waited
  // for, missing neighbours go out as one request, and an error goes to everyone who waited; the
  // next call tries again. Sequential foreground reads have frames fetched ahead of them.
  // kCancelled if the last user of the blob, or the store, goes before the fetch began. `stats` may
  // be null.
  virtual void Fetch(uint64_t offset, uint64_t length, Priority priority,
                     std::shared_ptr<ReadStats> stats, std::function<void(absl::Status)> done) = 0;

  // Gets the chunk table and puts it into the node's index, in the background: from then on frames
  // are copied from other blobs where they can be, and other blobs' from this one. Apart from
  // Attach, since it costs more than attaching: call it when nobody waits any more.
  virtual void ShareChunks() = 0;

  // Frames in the data file (verified or not), and their uncompressed bytes.
  virtual uint64_t present_frames() const = 0;
};

// Owns the fetch threads. Thread-safe.
class BlobStore {
 public:
  struct Options {
    std::string directory;             // <state>/blobs, made if missing
    std::shared_ptr<NodeIndex> index;  // null: no copying between blobs
    int threads = 0;                   // 0: two for each processor, 16 at most
  };
  // kUnavailable if the directory is in use by another store, in this process or another one.
  static absl::StatusOr<std::unique_ptr<BlobStore>> Open(Options options);
  // Waits for fetches that run, fails those that wait. Blobs must be gone.
  virtual ~BlobStore() = default;

  // Opens a blob: from the local files if they are there and match the descriptor, else by reading
  // its tables from the origin. One blob is one object however often it is attached; the origin
  // given last serves it from then on, and may be null if the local files are complete.
  // kFailedPrecondition if the blob is attached with another descriptor.
  virtual absl::StatusOr<std::shared_ptr<Blob>> Attach(const LayerDescriptor& descriptor,
                                                       std::shared_ptr<Origin> origin) = 0;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_BLOB_STORE_H_
