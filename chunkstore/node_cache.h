// SPDX-License-Identifier: Apache-2.0
//
// What the blobs of a store may keep in their data files: counts it, and evicts the frames that
// were not used for longest when it is too much. Knows blobs by CachedBlob only.
#ifndef LAMINA_CHUNKSTORE_NODE_CACHE_H_
#define LAMINA_CHUNKSTORE_NODE_CACHE_H_

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"
#include "chunkstore/cache_limits.h"
#include "chunkstore/data_readers.h"

namespace lamina::chunkstore {

// Blobs are named by LayerDescriptor::Key() here.
//
// Later than all that NodeCache::now() tells.
inline constexpr UseTime kAnyTime = std::numeric_limits<UseTime>::max();

// A blob as the cache sees it. Thread-safe.
class CachedBlob {
 public:
  virtual ~CachedBlob() = default;
  // Calls `visit` for each frame in the data file, in ascending order.
  virtual void VisitFrames(
      const std::function<void(uint32_t frame, UseTime used)>& visit) const = 0;
  // Takes frames out of the data file, but for those that are in use or under way at this moment.
  // Returns the bytes that this freed.
  virtual absl::StatusOr<uint64_t> Evict(std::span<const uint32_t> frames) = 0;
  // Has all frames checked before they are used again if the file system could not write some of the
  // data file to its disk, or somebody has cut the file. To be called every few seconds, by one thread.
  virtual void CheckWriteBack() = 0;
  virtual uint64_t present_bytes() const = 0;
  // Somebody has it attached.
  virtual bool attached() const = 0;
};

// Thread-safe. Shared by a store and its blobs, which may outlive the store: Stop() ends all
// eviction.
//
// A thread of its own looks every few seconds whether data files could be written to the disk.
//
// Eviction starts in the background, on that thread, before the limit is reached, and goes
// on until there is some room again. Whoever stores a frame when there is none left evicts what it
// needs itself. Frames that readers are waiting for or reading are never evicted, nor are those of
// pinned blobs: if nothing else is left, the limit is exceeded, by no more than that.
class NodeCache {
 public:
  // Opens a blob that is in the directory but not open, to evict from it; null if that cannot be
  // done now. Called without locks.
  using OpenBlob = std::function<std::shared_ptr<CachedBlob>(const Digest&)>;

  // `directory` is where the blobs are (blob_store.h); empty if they are in memory, then `open` is
  // never called.
  NodeCache(const CacheLimits& limits, std::string directory, OpenBlob open);
  ~NodeCache() { Stop(); }

  void Start();
  // Returns when nothing is being evicted any more.
  void Stop();

  DataReaders& readers() { return readers_; }

  // A clock that goes on with every frame that is stored, and every few seconds: fine enough to
  // tell the frames of a small cache apart, and cheap to look at.
  UseTime now() const { return clock_.load(std::memory_order_relaxed); }
  // Lets it go on, and returns the new time.
  UseTime Tick() { return clock_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // Bytes of frames in data files, of blobs that are open or not.
  uint64_t used() const { return used_.load(); }
  // What that may be at the moment, given the free space of the file system.
  uint64_t limit() const { return limit_.load(std::memory_order_relaxed); }
  // Bytes evicted so far.
  uint64_t evicted() const { return evicted_.load(std::memory_order_relaxed); }
  // Bytes that one reader may have fetched ahead of what it asked for: little in a small cache, or
  // they would be evicted before they are used.
  uint64_t allowed_ahead() const { return limit() / 8; }

  // A blob is open from Opened() to Closed(), and may be opened anew before it is closed. Opened()
  // returns when it was last used; its bytes are then counted with Add(), until Closed() takes them
  // over.
  UseTime Opened(const Digest& key, std::weak_ptr<CachedBlob> blob);
  void Closed(const Digest& key, uint64_t present_bytes, UseTime used);
  // A user has come: limits are kept from now on, if they were not (CacheLimits::once_attached).
  void Attached() { keeps_limits_.store(true, std::memory_order_relaxed); }
  void Add(uint64_t bytes) { used_.fetch_add(bytes); }
  void Subtract(uint64_t bytes) { used_.fetch_sub(bytes); }

  // Room for a frame that is being stored, counted as used as long as it lives.
  class Room {
   public:
    Room(Room&& other) noexcept
        : cache_(std::exchange(other.cache_, nullptr)), bytes_(other.bytes_) {}
    ~Room() {
      if (cache_ != nullptr) cache_->reserved_.fetch_sub(bytes_);
    }

   private:
    friend class NodeCache;
    Room(NodeCache* cache, uint64_t bytes) : cache_(cache), bytes_(bytes) {}
    NodeCache* cache_;
    uint64_t bytes_;
  };
  // Evicts if need be, only what was last used before `before`. With kAnyTime it always succeeds;
  // else kResourceExhausted says that the cache is full of frames that were used since.
  absl::StatusOr<Room> MakeRoom(uint64_t bytes, UseTime before);

  // For a disk that is full although the limit is not reached: evicts about `bytes`, whenever it
  // was used, and returns what that was.
  uint64_t Reclaim(uint64_t bytes);
  // Evicts until no more than `bytes` are used, or only pinned frames and those in use are left.
  void Shrink(uint64_t bytes);

  // No eviction begins or goes on as long as this is held.
  std::unique_lock<std::mutex> PauseEviction() { return std::unique_lock(evict_mutex_); }

  // Blobs of which nothing is evicted from now on, in place of those named before.
  void SetPinned(absl::flat_hash_set<Digest> blobs);

  struct Entry {
    Digest key;
    bool attached = false;
    bool pinned = false;
    uint64_t bytes = 0;  // of frames in the data file
  };
  // All blobs of the directory, in no order.
  std::vector<Entry> Blobs();
  // The blob's directory is gone. It must not be open.
  void Forget(const Digest& key);

 private:
  struct Known {
    std::weak_ptr<CachedBlob> blob;  // of the last Opened()
    int open = 0;
    uint64_t bytes = 0;  // while it is not open
    UseTime used = 0;    // likewise
  };
  // A blob that may be evicted from.
  struct Candidate {
    Digest key;
    std::shared_ptr<CachedBlob> blob;  // null if it is not open
    uint64_t bytes = 0;                // if it is not open
    UseTime used = 0;                  // likewise
  };

  void Scan();
  void ScanOnce() {
    std::call_once(scanned_, [this] { Scan(); });
  }
  void Work();
  void CheckWriteBack();
  void UpdateLimit();
  // What counts against the limit.
  uint64_t wanted() const { return used_.load() + reserved_.load(); }
  // Evicts what was last used before `before` until no more than `level` is wanted, a slice at the
  // most. Does nothing if it was in vain a moment ago and little has changed, unless `insist`.
  // Returns the bytes evicted.
  uint64_t EvictTo(uint64_t level, UseTime before, bool insist = false);
  // With evict_mutex_ held, as those below.
  uint64_t EvictBytes(uint64_t bytes, UseTime before);
  std::vector<Candidate> Candidates();
  // Evicts the oldest `frames` frames that were used before `before`. Says if there are no more.
  uint64_t EvictOldest(uint64_t frames, UseTime before, bool* all);
  uint64_t EvictFrom(CachedBlob& blob, UseTime up_to, uint64_t* frames);

  const CacheLimits limits_;
  const std::string directory_;
  const OpenBlob open_;
  DataReaders readers_;
  std::atomic<UseTime> clock_;
  std::atomic<uint64_t> used_{0};
  std::atomic<uint64_t> reserved_{0};
  std::atomic<uint64_t> evicted_{0};
  std::atomic<uint64_t> limit_;
  std::atomic<uint64_t> limit_is_of_{0};  // used_ when limit_ was found
  std::atomic<bool> keeps_limits_;
  std::once_flag scanned_;

  std::mutex mutex_;  // guards what the blobs are; never held while one is called or let go of
  absl::flat_hash_map<Digest, Known> blobs_;
  absl::flat_hash_set<Digest> pinned_;

  std::mutex evict_mutex_;  // one evicts at a time
  // When nothing was found to evict, and what was used then. Guarded by evict_mutex_.
  std::chrono::steady_clock::time_point in_vain_at_;
  uint64_t in_vain_used_ = 0;
  bool can_evict_ = true;  // guarded by it, too
  std::atomic<bool> stopped_{false};

  std::mutex wake_mutex_;
  std::condition_variable wake_;
  bool woken_ = false;  // guarded by wake_mutex_
  std::thread thread_;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_NODE_CACHE_H_
