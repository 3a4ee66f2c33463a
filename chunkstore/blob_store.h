// SPDX-License-Identifier: Apache-2.0
//
// The blobs of a node: each a sparse file that is the blob's address space, filled frame by frame
// on demand. Kept in `<state>/blobs/<hex>/`, where <hex> is LayerDescriptor::Key():
//   layer      digest of the layer blob
//   sections   section table as in the object, checked against the descriptor on open
//   frames     decoded frame table
//   metadata   decoded EROFS metadata, padded to 2 MiB
//   chunks     decoded chunk table
//   checksums  XXH3 of the three above, and ContentDigest() of the chunk table
//   data       the address space, sparse, padded to 2 MiB
//   present    bitmap: one bit a frame, set after the frame's bytes are in `data`, cleared before
//              they are evicted
// The time of `sections` is when the blob was used last.
//
// What the data files hold together is limited (CacheLimits): the frames that were not used for
// longest are evicted, which makes them holes, and fetched again when they are needed.
// data_readers.h says how readers and eviction get along.
//
// Crash rules. A bit is set only after the write and cleared before the hole is punched, so a
// killed process loses nothing and leaves no bit without its bytes. What the disk
// made of it is never taken on trust: every process checks a frame that it finds present against
// its XXH3 when it is first used, and fetches it again if it does not match. This covers a machine
// crash, a truncated or damaged file and a restored backup with one rule, and needs no mark of a
// clean end. Damaged tables are fetched again, and the frames stay; a section table that is not
// exactly the descriptor's has everything fetched again, since nothing else says whose data it is.
// Bytes whose bits were lost are punched when the blob is opened. And what a file system could not write
// to its disk is found out within seconds: all frames of the data file are checked again then.
#ifndef LAMINA_CHUNKSTORE_BLOB_STORE_H_
#define LAMINA_CHUNKSTORE_BLOB_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "chunkstore/blob_tables.h"
#include "chunkstore/cache_limits.h"
#include "chunkstore/data_readers.h"
#include "chunkstore/node_index.h"
#include "chunkstore/origin.h"
#include "chunkstore/stats.h"

namespace lamina::chunkstore {

// Who a fetch is for: a reader that waits; a reader that will soon want it (readahead); a start that
// was recorded or is expected, with large requests; nobody in particular.
enum class Priority { kForeground, kPrefetch, kBulk, kIdle };

// Compressed bytes that FetchBulk has under way at once, for each call: a reader that wants a frame
// of it waits for as much at the most.
inline constexpr uint64_t kBulkWindow = 8 << 20;

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
  // ContentDigest() of the blob's chunk table.
  virtual const Digest& content_digest() const = 0;
  virtual const FrameTable& frames() const = 0;
  // The data file: for reading under a Hold, or in the `done` of a foreground fetch. Not to be
  // mapped.
  virtual int data_fd() const = 0;

  // True if every byte of the range is in the data file and was verified by this process. It may be
  // evicted the next moment: this is to decide what to fetch, not to read. Never blocks and takes
  // no lock. The range must be inside the data file; what lies past size() is zeros and always
  // ready.
  virtual bool Ready(uint64_t offset, uint64_t length) const = 0;

  // Like Ready(), and true for as long as the object lives that it returns; an empty one says no.
  // Keep it until the bytes are where they cannot change (data_readers.h), and no longer: eviction
  // waits for it. It must not outlive the blob.
  using Hold = DataReaders::Section;
  virtual Hold HoldIfReady(uint64_t offset, uint64_t length) = 0;

  // Makes the range ready, then calls `done` once: on the caller's thread if it is ready now, else
  // on a thread of the store, which `done` must not block. Frames that are being fetched are waited
  // for, missing neighbours go out as one request, and an error goes to everyone who waited; the
  // next call tries again. Sequential foreground reads have frames fetched ahead of them.
  // After a foreground fetch the range stays in the data file until `done` returns, whatever the
  // cache's limit, so ask for what is read at once, a few MiB at most. A prefetch evicts only what
  // was not used since it was asked for; kResourceExhausted if that is not enough.
  // kCancelled if the last user of the blob, or the store, goes before the fetch began. `stats` may
  // be null.
  virtual void Fetch(uint64_t offset, uint64_t length, Priority priority,
                     std::shared_ptr<ReadStats> stats, std::function<void(absl::Status)> done) = 0;

  // Puts the chunk table into the node's index, in the background: from then on frames
  // are copied from other blobs where they can be, and other blobs' from this one. Apart from
  // Attach, since it costs more than attaching: call it when nobody waits any more.
  virtual void ShareChunks() = 0;

  // For a range whose fetch failed with kResourceExhausted, the disk being full: gets it from the
  // data file where it is there, else from the origin, verified, and keeps nothing. Blocks as long
  // as the origin takes. The range must be inside the data file.
  virtual absl::Status ReadThrough(uint64_t offset, std::span<std::byte> into,
                                   ReadStats& stats) = 0;

  // Fetches those frames from `first` to before `end` that are neither on the node nor under way
  // when it begins, with requests as large as kBulkWindow: neighbours, and frames with little
  // between them, are one. `priority` is kBulk or kIdle. Ends early when `stop` is requested. `done`
  // is called once, from a thread of the store, which it must not block, and gets the first error,
  // or kOk when all of the frames came, those that were under way as well; a reader that came to
  // wait for one of the frames gets an error only if fetching the frame by itself fails as well. Only
  // what was not used since `since` is evicted for them, or since the call if there is none. `stats`
  // may be null.
  virtual void FetchBulk(uint32_t first, uint32_t end, Priority priority,
                         std::optional<UseTime> since, std::shared_ptr<ReadStats> stats,
                         std::stop_token stop, std::function<void(absl::Status)> done) = 0;

  // Whether a frame is in the data file, verified or not.
  virtual bool Present(uint32_t frame) const = 0;
  // Frames in the data file (verified or not), and their uncompressed bytes.
  virtual uint64_t present_frames() const = 0;
  virtual uint64_t present_bytes() const = 0;
};

// Owns the fetch threads. Thread-safe.
class BlobStore {
 public:
  struct Options {
    std::string directory;             // <state>/blobs, made if missing
    std::shared_ptr<NodeIndex> index;  // null: no copying between blobs
    int threads = 0;                   // 0: two for each processor, 16 at most
    CacheLimits limits;
    // Nothing is written: tables and data are in anonymous memory, and gone when the last user of a
    // blob is. `directory` and `index` are not used. Unless limits.max_bytes says less or more,
    // data take kMemoryCache bytes: enough that readers of neighbouring blocks decompress a frame
    // once.
    bool in_memory = false;
  };
  static constexpr uint64_t kMemoryCache = 32 << 20;

  // kUnavailable if the directory is in use by another store, in this process or another one.
  static absl::StatusOr<std::unique_ptr<BlobStore>> Open(Options options);
  // Waits for fetches that run, fails those that wait. Blobs must be gone.
  virtual ~BlobStore() = default;

  // Opens a blob: from the local files if they are there and match the descriptor, else by reading
  // its tables from the origin, which may be null if the local files are complete. One blob is one
  // object however often it is attached, and each origin that it was attached with serves it: one
  // that fails, or has wrong bytes, is passed over for the next (origin_blob.h). Who attaches a blob
  // waits for another one's origin only if it is the same.
  virtual absl::StatusOr<std::shared_ptr<Blob>> Attach(const LayerDescriptor& descriptor,
                                                       std::shared_ptr<Origin> origin) = 0;

  // A blob that is in the store, attached or not.
  struct BlobUsage {
    Digest key;     // LayerDescriptor::Key()
    Digest digest;  // of the layer; zeros if that is not known, because its file is damaged
    bool attached = false;
    bool pinned = false;
    uint64_t content_bytes = 0;  // 0 if the blob is in memory
    uint64_t present_bytes = 0;  // of that in the data file
    int64_t last_used = 0;       // seconds since 1970; of one that is attached, when that was done
  };
  struct Usage {
    uint64_t used_bytes = 0;       // in all data files
    uint64_t evicted_bytes = 0;    // since the store was opened
    uint64_t limit_bytes = 0;      // what that may be now, as the limits and the free space have it
    std::vector<BlobUsage> blobs;  // by digest, then key
  };
  virtual Usage GetUsage() = 0;
  // Usage::limit_bytes alone, which takes no time.
  virtual uint64_t limit_bytes() const = 0;

  // Nothing of these blobs, named by their keys, is evicted from now on, in place of those named
  // before. Blobs that are not in the store may be named.
  virtual void SetPinned(std::span<const Digest> keys) = 0;
  // Evicts the frames that were not used for longest until data files hold no more than `bytes`, or
  // nothing is left but what is pinned or being read.
  virtual void Shrink(uint64_t bytes) = 0;
  // Removes a blob, named by its key, with everything that is known of it. kNotFound if it is not in
  // the store, kFailedPrecondition if it is attached.
  virtual absl::Status Remove(const Digest& key) = 0;
  // A frame of a blob as an object other than the blob holds it: the same bytes, `offset` into it.
  struct PackedFrame {
    std::shared_ptr<Blob> blob;  // of this store
    uint32_t frame = 0;
    uint64_t offset = 0;
  };
  // Blob::FetchBulk for frames that are also in `pack`, in the order of their offsets. Each is
  // checked against its blob's frame table: what the pack has wrong is not taken, and comes from
  // the blob's origin if a reader waits for it.
  virtual void FetchPacked(std::shared_ptr<OriginObject> pack, std::vector<PackedFrame> frames,
                           Priority priority, std::optional<UseTime> since,
                           std::shared_ptr<ReadStats> stats, std::stop_token stop,
                           std::function<void(absl::Status)> done) = 0;
  // How many requests of those two run at the same time; others wait.
  virtual int bulk_requests() const = 0;
  // Lets the clock of uses go on, and returns the new time: a `since` for several requests.
  virtual UseTime Tick() = 0;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_BLOB_STORE_H_
