// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/node_cache.h"

#include <spdlog/spdlog.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <string>

#include "chunkstore/format.h"
#include "chunkstore/local_blob.h"

namespace lamina::chunkstore {
namespace {

using std::chrono::steady_clock;

// How often the free space is looked at when nothing is stored: others fill the disk too. And how often
// it is asked whether the disk has taken what was written.
constexpr std::chrono::seconds kPeriod(5);
// Bytes stored after which the free space is looked at again.
constexpr uint64_t kLimitGoodFor = 16 << 20;
// What one thread evicts before another one may.
constexpr uint64_t kSlice = 64 << 20;
// How long nobody looks again when there was nothing to evict, since looking goes through all
// frames; and what part of them may come meanwhile.
constexpr std::chrono::milliseconds kVainPause(100);
constexpr uint64_t kVainPart = 1024;
// Frames of a blob that are evicted at once: readers that want one of them wait for all.
constexpr size_t kEvictTogether = 64;
// The clock's first time. Below it is room to put a million blobs of earlier processes in order.
constexpr UseTime kFirstTime = 1 << 20;

// Eviction in the background begins at the first and ends at the second.
uint64_t HighMark(uint64_t limit) { return limit - limit / 16; }
uint64_t LowMark(uint64_t limit) { return limit - limit / 8; }

uint64_t FramesFor(uint64_t bytes) { return (bytes + kFrameSize - 1) / kFrameSize; }

// Counts times of use, and finds the one up to which a number of frames was used. Two rounds over
// the same frames (the second one fills in the half word of the bucket that the first one found),
// so that it takes the same memory for any number of them.
class TimeFinder {
 public:
  void Count(UseTime used, uint64_t frames) {
    if (round_ == 0) {
      counts_[used >> 16] += frames;
    } else if (used >> 16 == high_) {
      counts_[used & 0xffff] += frames;
    }
  }
  // Ends a round. False if there are fewer than `wanted` frames.
  bool Find(uint64_t wanted) {
    uint64_t seen = round_ == 0 ? 0 : before_;
    for (uint32_t i = 0; i < counts_.size(); ++i) {
      if (seen + counts_[i] < wanted) {
        seen += counts_[i];
        continue;
      }
      (round_ == 0 ? high_ : low_) = i;
      before_ = seen;
      ++round_;
      std::ranges::fill(counts_, 0);
      return true;
    }
    return false;
  }
  UseTime time() const { return high_ << 16 | low_; }

 private:
  std::vector<uint64_t> counts_ = std::vector<uint64_t>(1 << 16);
  int round_ = 0;
  uint64_t before_ = 0;
  uint32_t high_ = 0;
  uint32_t low_ = 0;
};

}  // namespace

NodeCache::NodeCache(const CacheLimits& limits, std::string directory, OpenBlob open)
    : limits_(limits),
      directory_(std::move(directory)),
      open_(std::move(open)),
      clock_(kFirstTime),
      limit_(limits.max_bytes),
      keeps_limits_(!limits.once_attached) {}

void NodeCache::Start() {
  if (!limits_.bounded() && directory_.empty()) return;
  UpdateLimit();
  thread_ = std::thread([this] { Work(); });
}

void NodeCache::Stop() {
  {
    std::lock_guard lock(wake_mutex_);
    stopped_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard no_longer_evicting(evict_mutex_);
}

UseTime NodeCache::Opened(const Digest& key, std::weak_ptr<CachedBlob> blob) {
  std::lock_guard lock(mutex_);
  const auto [entry, added] = blobs_.try_emplace(key);
  Known& known = entry->second;
  if (added) known.used = kFirstTime;
  if (++known.open == 1) used_.fetch_sub(std::exchange(known.bytes, 0));
  known.blob = std::move(blob);
  return known.used;
}

void NodeCache::Closed(const Digest& key, uint64_t present_bytes, UseTime used) {
  std::lock_guard lock(mutex_);
  Known& known = blobs_[key];
  if (--known.open > 0 || directory_.empty()) {
    used_.fetch_sub(present_bytes);  // the other one counts them too, or they are gone
    if (known.open == 0) blobs_.erase(key);
    return;
  }
  known.bytes = present_bytes;
  known.used = used;
}

void NodeCache::SetPinned(absl::flat_hash_set<Digest> blobs) {
  std::lock_guard lock(mutex_);
  pinned_ = std::move(blobs);
}

std::vector<NodeCache::Entry> NodeCache::Blobs() {
  ScanOnce();
  std::vector<Entry> entries;
  std::vector<std::shared_ptr<CachedBlob>> open;  // let go of without the lock
  std::lock_guard lock(mutex_);
  for (const auto& [key, known] : blobs_) {
    Entry entry{.key = key, .pinned = pinned_.contains(key), .bytes = known.bytes};
    if (std::shared_ptr<CachedBlob> blob = known.blob.lock(); blob != nullptr) {
      entry.attached = blob->attached();
      entry.bytes = blob->present_bytes();
      open.push_back(std::move(blob));
    }
    entries.push_back(entry);
  }
  return entries;
}

void NodeCache::Forget(const Digest& key) {
  std::lock_guard lock(mutex_);
  const auto entry = blobs_.find(key);
  if (entry == blobs_.end() || entry->second.open > 0) return;
  used_.fetch_sub(entry->second.bytes);
  blobs_.erase(entry);
}

// Takes the blobs into account that earlier processes left.
void NodeCache::Scan() {
  if (directory_.empty()) return;
  std::vector<BlobFiles> found = FindBlobFiles(directory_);
  std::ranges::sort(found, {}, &BlobFiles::last_used);
  for (BlobFiles& blob : found) blob.present_bytes = PresentBytes(blob.directory);
  const auto count = static_cast<UseTime>(std::min<size_t>(found.size(), kFirstTime));
  std::lock_guard lock(mutex_);
  for (UseTime i = 0; i < count; ++i) {
    const BlobFiles& blob = found[found.size() - count + i];
    const auto [entry, added] = blobs_.try_emplace(blob.key);
    if (!added) continue;  // it was opened meanwhile
    entry->second.bytes = blob.present_bytes;
    entry->second.used = kFirstTime - count + i;
    used_.fetch_add(blob.present_bytes);
  }
}

void NodeCache::UpdateLimit() {
  limit_is_of_ = used();
  if (limits_.min_free == 0 || directory_.empty()) return;
  struct statvfs info {};
  if (::statvfs(directory_.c_str(), &info) != 0) return;
  const uint64_t ours_and_free = used() + uint64_t{info.f_bavail} * info.f_frsize;
  limit_ = std::min(limits_.max_bytes, ours_and_free - std::min(ours_and_free, limits_.min_free));
}

absl::StatusOr<NodeCache::Room> NodeCache::MakeRoom(uint64_t bytes, UseTime before) {
  reserved_.fetch_add(bytes);
  Room room(this, bytes);
  if (!limits_.bounded()) return room;
  const uint64_t good_for = std::min(kLimitGoodFor, limit() / 64);
  if (used() > limit_is_of_.load() + good_for) UpdateLimit();
  const uint64_t limit = this->limit();
  if (before != kAnyTime) {
    // Stays below the mark itself: the background would not ask what was used since.
    while (wanted() > HighMark(limit)) {
      if (EvictTo(HighMark(limit), before) > 0 || wanted() <= HighMark(limit)) continue;
      return absl::ResourceExhaustedError(
          fmt::format("the node's cache ({} bytes) is full of what is in use", limit));
    }
    return room;
  }
  if (wanted() > HighMark(limit)) {
    std::lock_guard lock(wake_mutex_);
    woken_ = true;
    wake_.notify_one();
  }
  if (wanted() > limit) EvictTo(limit, before);
  return room;
}

void NodeCache::Work() {
  ScanOnce();
  steady_clock::time_point checked = steady_clock::now();
  std::unique_lock lock(wake_mutex_);
  while (!stopped_) {
    wake_.wait_for(lock, kPeriod, [this] { return stopped_ || woken_; });
    woken_ = false;
    lock.unlock();
    Tick();
    UpdateLimit();
    if (steady_clock::now() - checked >= kPeriod) {
      CheckWriteBack();
      checked = steady_clock::now();
    }
    if (keeps_limits_ && wanted() > HighMark(limit())) {
      while (EvictTo(LowMark(limit()), kAnyTime) != 0) {
      }
    }
    lock.lock();
  }
}

void NodeCache::CheckWriteBack() {
  std::vector<std::shared_ptr<CachedBlob>> open;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, known] : blobs_) {
      if (std::shared_ptr<CachedBlob> blob = known.blob.lock()) open.push_back(std::move(blob));
    }
  }
  for (const std::shared_ptr<CachedBlob>& blob : open) blob->CheckWriteBack();
}

void NodeCache::Shrink(uint64_t bytes) {
  ScanOnce();
  while (EvictTo(bytes, kAnyTime, /*insist=*/true) != 0) {
  }
}

uint64_t NodeCache::Reclaim(uint64_t bytes) {
  ScanOnce();
  std::lock_guard lock(evict_mutex_);
  return EvictBytes(bytes, kAnyTime);
}

uint64_t NodeCache::EvictTo(uint64_t level, UseTime before, bool insist) {
  std::lock_guard lock(evict_mutex_);
  const uint64_t wanted = this->wanted();  // another thread may have evicted enough
  if (wanted <= level) return 0;
  const bool little_changed = steady_clock::now() - in_vain_at_ < kVainPause &&
                              used() <= in_vain_used_ + in_vain_used_ / kVainPart;
  if (before == kAnyTime && little_changed && !insist) return 0;
  const uint64_t freed = EvictBytes(std::min(wanted - level, kSlice), before);
  if (freed == 0 && before == kAnyTime) {
    in_vain_at_ = steady_clock::now();
    in_vain_used_ = used();
  }
  return freed;
}

uint64_t NodeCache::EvictBytes(uint64_t bytes, UseTime before) {
  uint64_t freed = 0;
  // Frames have different sizes, and some cannot be evicted now: then more are looked at.
  for (uint64_t frames = FramesFor(bytes); freed < bytes && !stopped_ && can_evict_;) {
    bool all = false;
    const uint64_t got = EvictOldest(frames, before, &all);
    freed += got;
    if (all) break;
    frames = got == 0 ? 4 * frames : FramesFor(bytes - std::min(freed, bytes));
  }
  return freed;
}

std::vector<NodeCache::Candidate> NodeCache::Candidates() {
  std::vector<Candidate> candidates;
  std::lock_guard lock(mutex_);
  for (const auto& [key, known] : blobs_) {
    if (pinned_.contains(key)) continue;
    std::shared_ptr<CachedBlob> blob = known.open > 0 ? known.blob.lock() : nullptr;
    if (blob == nullptr && known.bytes == 0) continue;
    candidates.push_back({key, std::move(blob), known.bytes, known.used});
  }
  return candidates;
}

uint64_t NodeCache::EvictOldest(uint64_t frames, UseTime before, bool* all) {
  std::vector<Candidate> candidates = Candidates();
  TimeFinder finder;
  bool enough = true;
  for (int round = 0; round < 2 && enough; ++round) {
    for (const Candidate& candidate : candidates) {
      if (candidate.blob == nullptr) {
        if (candidate.used < before) finder.Count(candidate.used, FramesFor(candidate.bytes));
        continue;
      }
      candidate.blob->VisitFrames([&](uint32_t /*frame*/, UseTime used) {
        if (used < before) finder.Count(used, 1);
      });
    }
    enough = finder.Find(frames);
  }
  *all = !enough;
  const UseTime up_to = enough ? finder.time() : before - 1;
  uint64_t left = enough ? frames : std::numeric_limits<uint64_t>::max();
  uint64_t freed = 0;
  for (Candidate& candidate : candidates) {
    if (left == 0 || stopped_) break;
    if (candidate.blob == nullptr) {
      if (candidate.used > up_to) continue;
      candidate.blob = open_(candidate.key);
      if (candidate.blob == nullptr) continue;
    }
    freed += EvictFrom(*candidate.blob, up_to, &left);
    candidate.blob = nullptr;
  }
  return freed;
}

uint64_t NodeCache::EvictFrom(CachedBlob& blob, UseTime up_to, uint64_t* frames) {
  std::vector<uint32_t> chosen;
  blob.VisitFrames([&](uint32_t frame, UseTime used) {
    if (used <= up_to && chosen.size() < *frames) chosen.push_back(frame);
  });
  *frames -= chosen.size();
  uint64_t freed = 0;
  for (std::span<const uint32_t> rest = chosen; !rest.empty();) {
    const std::span<const uint32_t> batch = rest.first(std::min(rest.size(), kEvictTogether));
    rest = rest.subspan(batch.size());
    const absl::StatusOr<uint64_t> evicted = blob.Evict(batch);
    if (!evicted.ok()) {
      // A file system without holes. What is there stays, and limits cannot be kept.
      if (absl::IsUnimplemented(evicted.status())) can_evict_ = false;
      spdlog::error("evict: {}", std::string(evicted.status().message()));
      break;
    }
    freed += *evicted;
  }
  evicted_.fetch_add(freed, std::memory_order_relaxed);
  return freed;
}

}  // namespace lamina::chunkstore
