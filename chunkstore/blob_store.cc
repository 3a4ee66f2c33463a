// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/blob_store.h"

#include <absl/container/flat_hash_map.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/chunk_copier.h"
#include "chunkstore/directory_lock.h"
#include "chunkstore/fetch_pool.h"
#include "chunkstore/local_blob.h"
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

// Directories that a killed process was making or removing; blobs have no dot in front.
void RemoveLeftovers(const std::string& directory) {
  std::error_code error;
  std::filesystem::directory_iterator entries(directory, error);
  while (!error && entries != std::filesystem::directory_iterator()) {
    const std::filesystem::path path = entries->path();
    if (path.filename().native().starts_with(".")) {
      std::error_code failed;
      std::filesystem::remove_all(path, failed);
      if (failed) spdlog::warn("remove leftover {}: {}", path.native(), failed.message());
    }
    entries.increment(error);
  }
}

class DirectoryStore : public BlobStore {
 public:
  DirectoryStore(std::string directory, UniqueFd lock, int threads,
                 std::shared_ptr<NodeIndex> index)
      : directory_(std::move(directory)),
        lock_(std::move(lock)),
        pool_(std::make_shared<FetchPool>(threads)),
        copier_(index == nullptr ? nullptr
                                 : std::make_shared<ChunkCopier>(directory_, std::move(index))) {}
  ~DirectoryStore() override { pool_->Stop(); }

  absl::StatusOr<std::shared_ptr<Blob>> Attach(const LayerDescriptor& descriptor,
                                               std::shared_ptr<Origin> origin) override;

 private:
  // One for each digest that is attached, or being attached by a thread that holds the mutex.
  struct Slot {
    std::mutex mutex;
    std::weak_ptr<StoredBlob> blob;
  };

  std::shared_ptr<Slot> SlotOf(const Digest& digest);
  absl::StatusOr<std::unique_ptr<LocalBlob>> OpenLocal(const LayerDescriptor& descriptor,
                                                       std::shared_ptr<Origin> origin);

  const std::string directory_;
  const UniqueFd lock_;
  const std::shared_ptr<FetchPool> pool_;
  const std::shared_ptr<ChunkCopier> copier_;
  std::mutex mutex_;
  absl::flat_hash_map<Digest, std::shared_ptr<Slot>> slots_;
};

std::shared_ptr<DirectoryStore::Slot> DirectoryStore::SlotOf(const Digest& digest) {
  std::lock_guard lock(mutex_);
  absl::erase_if(slots_, [](const auto& entry) {
    const std::unique_lock idle(entry.second->mutex, std::try_to_lock);
    return idle.owns_lock() && entry.second.use_count() == 1 && entry.second->blob.expired();
  });
  std::shared_ptr<Slot>& slot = slots_[digest];
  if (slot == nullptr) slot = std::make_shared<Slot>();
  return slot;
}

absl::StatusOr<std::shared_ptr<Blob>> DirectoryStore::Attach(const LayerDescriptor& descriptor,
                                                             std::shared_ptr<Origin> origin) {
  const std::shared_ptr<Slot> slot = SlotOf(descriptor.digest);
  std::lock_guard lock(slot->mutex);
  std::shared_ptr<StoredBlob> blob = slot->blob.lock();
  if (blob == nullptr) {
    ASSIGN_OR_RETURN(std::unique_ptr<LocalBlob> local, OpenLocal(descriptor, origin), "blob {}",
                     descriptor.digest.ToString());
    blob = std::make_shared<StoredBlob>(descriptor, std::move(local), std::move(origin), pool_,
                                        copier_);
    slot->blob = blob;
  } else if (blob->descriptor() == descriptor) {
    blob->SetOrigin(std::move(origin));
  } else {
    // Two manifests name one blob, but disagree on what is in it.
    return absl::FailedPreconditionError(fmt::format(
        "blob {} is attached with another section table ({}, not {})", descriptor.digest.ToString(),
        blob->descriptor().section_table_digest.ToString(),
        descriptor.section_table_digest.ToString()));
  }
  return blob->NewHandle();
}

absl::StatusOr<std::unique_ptr<LocalBlob>> DirectoryStore::OpenLocal(
    const LayerDescriptor& descriptor, std::shared_ptr<Origin> origin) {
  const std::string directory = fmt::format("{}/{}", directory_, descriptor.digest.Hex());
  absl::StatusOr<std::unique_ptr<LocalBlob>> local = LocalBlob::Open(directory, descriptor);
  const bool damaged = absl::IsDataLoss(local.status());
  if (!damaged && !absl::IsNotFound(local.status())) return local;
  if (damaged) {
    spdlog::warn("blob {}: its tables are fetched again: {}", descriptor.digest.ToString(),
                 std::string(local.status().message()));
  }
  OriginBlob source(descriptor, std::move(origin));
  ASSIGN_OR_RETURN(const BlobTables tables, source.ReadTables());
  RETURN_IF_ERROR(LocalBlob::Create(directory, descriptor, tables));
  return LocalBlob::Open(directory, descriptor);
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlobStore>> BlobStore::Open(Options options) {
  ASSIGN_OR_RETURN(UniqueFd lock, LockDirectory(options.directory), "open blob store");
  RemoveLeftovers(options.directory);
  const int threads = options.threads > 0 ? options.threads : DefaultThreads();
  return std::make_unique<DirectoryStore>(std::move(options.directory), std::move(lock), threads,
                                          std::move(options.index));
}

}  // namespace lamina::chunkstore
