// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/blob_store.h"

#include <absl/container/flat_hash_map.h>
#include <spdlog/spdlog.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/bulk_fetch.h"
#include "chunkstore/chunk_copier.h"
#include "chunkstore/directory_lock.h"
#include "chunkstore/fetch_pool.h"
#include "chunkstore/local_blob.h"
#include "chunkstore/node_cache.h"
#include "chunkstore/origin_blob.h"
#include "chunkstore/stored_blob.h"

namespace lamina::chunkstore {
namespace {

// Bounds the memory of fetch buffers on large machines, 1.25 MiB a thread that is busy.
constexpr int kMaxDefaultThreads = 16;

int DefaultThreads() {
  const int processors = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U));
  return std::min(2 * processors, kMaxDefaultThreads);
}

// Directories that a killed process was making or removing (blobs have no dot in front), and those of
// earlier versions.
void RemoveLeftovers(const std::string& directory) {
  std::error_code error;
  std::filesystem::directory_iterator entries(directory, error);
  while (!error && entries != std::filesystem::directory_iterator()) {
    const std::filesystem::path path = entries->path();
    const bool is_old = IsOldBlobDirectory(path.native());
    if (is_old) spdlog::warn("{} is of an earlier version and is removed", path.native());
    if (is_old || path.filename().native().starts_with(".")) {
      std::error_code failed;
      std::filesystem::remove_all(path, failed);
      if (failed) spdlog::warn("remove leftover {}: {}", path.native(), failed.message());
    }
    entries.increment(error);
  }
}

CacheLimits LimitsOf(const BlobStore::Options& options) {
  CacheLimits limits = options.limits;
  if (!options.in_memory) return limits;
  limits.min_free = 0;
  if (!limits.bounded()) limits.max_bytes = BlobStore::kMemoryCache;
  return limits;
}

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;

// On a full disk: what is evicted to have room for the tables of a blob.
constexpr uint64_t kReclaimForTables = 32 << 20;

// At once for everyone who looks, however long it takes.
absl::Status RemoveDirectory(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path();
  ASSIGN_OR_RETURN(const TemporaryDirectory removed, TemporaryDirectory::Create(parent, ".old-"));
  if (::rename(path.c_str(), (removed.path() + "/blob").c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, "rename " + path);
}

class BlobStoreImpl : public BlobStore {
 public:
  // `options.directory` is empty for blobs in memory.
  BlobStoreImpl(Options options, UniqueFd lock)
      : directory_(std::move(options.directory)),
        lock_(std::move(lock)),
        index_(std::move(options.index)),
        shared_{.pool = std::make_shared<FetchPool>(options.threads > 0 ? options.threads
                                                                        : DefaultThreads()),
                .cache = std::make_shared<NodeCache>(
                    LimitsOf(options), directory_,
                    [this](const Digest& key) { return OpenToEvict(key); }),
                .copier = index_ == nullptr ? nullptr
                                            : std::make_shared<ChunkCopier>(directory_, index_)} {
    shared_.cache->Start();
  }
  ~BlobStoreImpl() override {
    shared_.pool->Stop();
    shared_.cache->Stop();
  }

  absl::StatusOr<std::shared_ptr<Blob>> Attach(const LayerDescriptor& descriptor,
                                               std::shared_ptr<Origin> origin) override;
  Usage GetUsage() override;
  uint64_t limit_bytes() const override { return shared_.cache->limit(); }
  void SetPinned(std::span<const Digest> keys) override {
    shared_.cache->SetPinned({keys.begin(), keys.end()});
  }
  void Shrink(uint64_t bytes) override { shared_.cache->Shrink(bytes); }
  absl::Status Remove(const Digest& key) override;
  void FetchPacked(std::shared_ptr<OriginObject> pack, std::vector<PackedFrame> frames,
                   Priority priority, std::optional<UseTime> since,
                   std::shared_ptr<ReadStats> stats, std::stop_token stop,
                   std::function<void(absl::Status)> done) override;
  int bulk_requests() const override { return shared_.pool->max_bulk(); }
  UseTime Tick() override { return shared_.cache->Tick(); }

 private:
  // One for each blob, by its key, that is open or being opened.
  struct Slot {
    std::mutex mutex;
    std::condition_variable changed;
    std::weak_ptr<StoredBlob> blob;
    std::set<std::string> reading;  // origins from which its tables are being read
  };

  std::string DirectoryOf(const Digest& key) const {
    return fmt::format("{}/{}", directory_, key.Hex());
  }
  std::shared_ptr<Slot> SlotOf(const Digest& key);
  std::shared_ptr<StoredBlob> FindOpen(const Digest& key);
  absl::StatusOr<std::unique_ptr<LocalBlob>> OpenLocal(const LayerDescriptor& descriptor) const;
  absl::StatusOr<std::unique_ptr<LocalBlob>> CreateLocal(const LayerDescriptor& descriptor,
                                                         BlobDraft& draft);
  absl::StatusOr<BlobDraft> ReadDraft(const LayerDescriptor& descriptor,
                                      const std::shared_ptr<Origin>& origin);
  std::shared_ptr<StoredBlob> OpenToEvict(const Digest& key);

  const std::string directory_;
  const UniqueFd lock_;
  const std::shared_ptr<NodeIndex> index_;
  const StoredBlob::Shared shared_;
  std::mutex mutex_;
  absl::flat_hash_map<Digest, std::shared_ptr<Slot>> slots_;
};

std::shared_ptr<BlobStoreImpl::Slot> BlobStoreImpl::SlotOf(const Digest& key) {
  std::lock_guard lock(mutex_);
  absl::erase_if(slots_, [](const auto& entry) {
    const std::unique_lock idle(entry.second->mutex, std::try_to_lock);
    return idle.owns_lock() && entry.second.use_count() == 1 && entry.second->blob.expired();
  });
  std::shared_ptr<Slot>& slot = slots_[key];
  if (slot == nullptr) slot = std::make_shared<Slot>();
  return slot;
}

std::shared_ptr<StoredBlob> BlobStoreImpl::FindOpen(const Digest& key) {
  const std::shared_ptr<Slot> slot = SlotOf(key);
  std::lock_guard lock(slot->mutex);
  return slot->blob.lock();
}

absl::StatusOr<std::shared_ptr<Blob>> BlobStoreImpl::Attach(const LayerDescriptor& descriptor,
                                                            std::shared_ptr<Origin> origin) {
  const std::string name = "blob " + descriptor.digest.ToString();
  const std::string origin_name = origin == nullptr ? "" : origin->name();
  const std::shared_ptr<Slot> slot = SlotOf(descriptor.Key());
  std::unique_lock lock(slot->mutex);
  const auto attach = [&](absl::StatusOr<std::unique_ptr<LocalBlob>> local)
      -> absl::StatusOr<std::shared_ptr<Blob>> {
    if (!local.ok()) return Annotate(local.status(), name);
    const auto blob = StoredBlob::Create(descriptor, *std::move(local), std::move(origin), shared_);
    slot->blob = blob;
    return blob->NewHandle();
  };
  while (true) {
    if (const std::shared_ptr<StoredBlob> blob = slot->blob.lock(); blob != nullptr) {
      blob->AddOrigin(std::move(origin));
      return blob->NewHandle();
    }
    // Who is to wait for another one need not check local tables as well.
    if (slot->reading.contains(origin_name)) {
      slot->changed.wait(lock);
      continue;
    }
    absl::StatusOr<std::unique_ptr<LocalBlob>> local = OpenLocal(descriptor);
    const bool damaged = absl::IsDataLoss(local.status());
    if (!damaged && !absl::IsNotFound(local.status())) return attach(std::move(local));
    slot->reading.insert(origin_name);
    if (damaged) {
      spdlog::warn("{}: its tables are fetched again: {}", name,
                   std::string(local.status().message()));
    }
    // Without the lock: an origin that does not answer holds up nobody who has another one.
    lock.unlock();
    absl::StatusOr<BlobDraft> draft = ReadDraft(descriptor, origin);
    lock.lock();
    slot->reading.erase(origin_name);
    slot->changed.notify_all();
    if (!draft.ok()) return Annotate(draft.status(), name);
    if (slot->blob.expired()) return attach(CreateLocal(descriptor, *draft));
  }
}

void BlobStoreImpl::FetchPacked(std::shared_ptr<OriginObject> pack, std::vector<PackedFrame> frames,
                                Priority priority, std::optional<UseTime> since,
                                std::shared_ptr<ReadStats> stats, std::stop_token stop,
                                std::function<void(absl::Status)> done) {
  BulkFetch::Options options{.pack = std::move(pack),
                             .since = since.has_value() ? *since : Tick(),
                             .priority = priority,
                             .stats = std::move(stats),
                             .stop = std::move(stop),
                             .done = std::move(done)};
  for (const PackedFrame& packed : frames) {
    // Not the user's handle: a task in the queue does not count as a user.
    auto& blob = static_cast<StoredBlob&>(*packed.blob);
    options.frames.push_back({blob.shared_from_this(), packed.frame, packed.offset});
  }
  shared_.pool->Add(std::make_shared<BulkFetch>(std::move(options)));
}

absl::StatusOr<std::unique_ptr<LocalBlob>> BlobStoreImpl::OpenLocal(
    const LayerDescriptor& descriptor) const {
  if (directory_.empty()) return absl::NotFoundError("nothing is kept on the disk");
  return LocalBlob::Open(DirectoryOf(descriptor.Key()), descriptor);
}

absl::StatusOr<BlobDraft> BlobStoreImpl::ReadDraft(const LayerDescriptor& descriptor,
                                                   const std::shared_ptr<Origin>& origin) {
  OriginBlob source(descriptor, origin);
  const auto read = [&]() -> absl::StatusOr<BlobDraft> {
    ASSIGN_OR_RETURN(BlobDraft draft, BlobDraft::Create(directory_));
    ASSIGN_OR_RETURN(draft.tables, source.ReadTables(draft.metadata()));
    return draft;
  };
  absl::StatusOr<BlobDraft> draft = read();
  if (!absl::IsResourceExhausted(draft.status()) || directory_.empty()) return draft;
  // The disk is full: content of other blobs goes first.
  shared_.cache->Reclaim(kReclaimForTables);
  return read();
}

absl::StatusOr<std::unique_ptr<LocalBlob>> BlobStoreImpl::CreateLocal(
    const LayerDescriptor& descriptor, BlobDraft& draft) {
  if (directory_.empty()) return LocalBlob::OpenInMemory(descriptor, draft);
  const std::string directory = DirectoryOf(descriptor.Key());
  absl::Status created = LocalBlob::Create(directory, descriptor, draft);
  if (absl::IsResourceExhausted(created)) {
    shared_.cache->Reclaim(kReclaimForTables);
    created = LocalBlob::Create(directory, descriptor, draft);
  }
  RETURN_IF_ERROR(created);
  return LocalBlob::Open(directory, descriptor);
}

// A blob that nobody has attached. If someone does so meanwhile, it is this object that they get.
std::shared_ptr<StoredBlob> BlobStoreImpl::OpenToEvict(const Digest& key) {
  const std::shared_ptr<Slot> slot = SlotOf(key);
  const std::unique_lock lock(slot->mutex, std::try_to_lock);
  if (!lock.owns_lock()) return nullptr;  // being attached
  std::shared_ptr<StoredBlob> blob = slot->blob.lock();
  if (blob != nullptr) return blob;
  const std::string directory = DirectoryOf(key);
  const auto descriptor = DescriptorOf(directory);
  auto local = descriptor.ok() ? LocalBlob::Open(directory, *descriptor)
                               : absl::StatusOr<std::unique_ptr<LocalBlob>>(descriptor.status());
  if (!local.ok()) {
    spdlog::warn("blob {}: cannot be evicted from: {}", key.Hex(),
                 std::string(local.status().message()));
    // Of damaged tables nothing is left that would make the data usable.
    const bool removed = absl::IsDataLoss(local.status()) && RemoveDirectory(directory).ok();
    if (removed || absl::IsNotFound(local.status())) shared_.cache->Forget(key);
    return nullptr;
  }
  blob = StoredBlob::Create(*descriptor, *std::move(local), nullptr, shared_);
  slot->blob = blob;
  return blob;
}

BlobStore::Usage BlobStoreImpl::GetUsage() {
  absl::flat_hash_map<Digest, BlobFiles> files;
  if (!directory_.empty()) {
    for (BlobFiles& found : FindBlobFiles(directory_)) files[found.key] = std::move(found);
  }
  Usage usage;
  for (const NodeCache::Entry& entry : shared_.cache->Blobs()) {
    BlobUsage blob{.key = entry.key,
                   .attached = entry.attached,
                   .pinned = entry.pinned,
                   .present_bytes = entry.bytes};
    if (const auto found = files.find(entry.key); found != files.end()) {
      blob.digest = found->second.layer;
      blob.content_bytes = found->second.content_bytes;
      blob.last_used = found->second.last_used / kNanosecondsPerSecond;
    } else if (const std::shared_ptr<StoredBlob> open = FindOpen(entry.key); open != nullptr) {
      blob.digest = open->descriptor().digest;
    }
    usage.blobs.push_back(blob);
  }
  std::ranges::sort(usage.blobs, {},
                    [](const BlobUsage& blob) { return std::pair(blob.digest, blob.key); });
  usage.used_bytes = shared_.cache->used();
  usage.evicted_bytes = shared_.cache->evicted();
  usage.limit_bytes = shared_.cache->limit();
  return usage;
}

absl::Status BlobStoreImpl::Remove(const Digest& key) {
  const std::string directory = DirectoryOf(key);
  // Nobody opens the blob to evict from it meanwhile, and who did has let go of it.
  const auto no_eviction = shared_.cache->PauseEviction();
  const std::shared_ptr<Slot> slot = SlotOf(key);
  const std::unique_lock lock(slot->mutex, std::try_to_lock);  // taken by who may wait for eviction
  if (!lock.owns_lock() || !slot->blob.expired()) {
    return absl::FailedPreconditionError(fmt::format("blob {} is in use", key.Hex()));
  }
  if (directory_.empty() || ::access(directory.c_str(), F_OK) != 0) {
    return absl::NotFoundError(fmt::format("there is no blob {}", key.Hex()));
  }
  if (index_ != nullptr) {
    // What stays in the index if this fails says where nothing is found, which does no harm.
    absl::Status status;
    const auto descriptor = DescriptorOf(directory);
    status = descriptor.status();
    if (descriptor.ok()) {
      const auto local = LocalBlob::Open(directory, *descriptor);
      const auto chunks =
          local.ok() ? (*local)->LoadChunks() : absl::StatusOr<const ChunkTable*>(local.status());
      status = chunks.ok() ? index_->RemoveBlob(key, **chunks) : chunks.status();
    }
    if (!status.ok()) {
      spdlog::info("blob {}: its chunks stay in the index: {}", key.Hex(),
                   std::string(status.message()));
    }
  }
  RETURN_IF_ERROR(RemoveDirectory(directory), "remove blob {}", key.Hex());
  shared_.cache->Forget(key);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlobStore>> BlobStore::Open(Options options) {
  UniqueFd lock;
  if (options.in_memory) {
    options.directory.clear();
    options.index = nullptr;
  } else {
    ASSIGN_OR_RETURN(lock, LockDirectory(options.directory), "open blob store");
    RemoveLeftovers(options.directory);
  }
  return std::make_unique<BlobStoreImpl>(std::move(options), std::move(lock));
}

}  // namespace lamina::chunkstore
