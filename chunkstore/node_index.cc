// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/node_index.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/slice_transform.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <mutex>
#include <numeric>

#include "chunkstore/base/file.h"
#include "chunkstore/directory_lock.h"

namespace lamina::chunkstore {
namespace {

using rocksdb::Slice;

// Memory. The index is looked into when a frame is missing, so it may be small and a little slow.
constexpr size_t kWriteBuffer = 2 << 20;
constexpr size_t kBlockCache = 2 << 20;
constexpr uint64_t kMinFree = 256 << 10;
constexpr int kOpenFiles = 64;
constexpr size_t kMaxBatch = 1 << 20;
constexpr size_t kMaxLocations = 4;

constexpr size_t kDigestSize = sizeof(Digest::bytes);
constexpr size_t kChunkKeySize = 2 * kDigestSize;  // digest of the chunk, then of the blob
constexpr char kChunks[] = "chunks";
constexpr char kBlobs[] = "blobs";
constexpr char kMounts[] = "mounts";

struct ChunkValue {
  uint32_t first_block;
  uint32_t length;
};
static_assert(sizeof(ChunkValue) == 8);

Slice AsSlice(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size()};
}

std::string ChunkKey(const uint8_t (&chunk)[kDigestSize], const Digest& blob) {
  std::string key(kChunkKeySize, '\0');
  std::memcpy(key.data(), chunk, kDigestSize);
  std::memcpy(key.data() + kDigestSize, blob.bytes.data(), kDigestSize);
  return key;
}

absl::Status Damaged(const std::string& text, const std::string& directory) {
  return absl::DataLossError(fmt::format(
      "{}; it is damaged: remove {} to start over, blobs are indexed again", text, directory));
}

absl::Status ToStatus(const rocksdb::Status& status, const std::string& directory,
                      std::string_view action) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = fmt::format("index {}: {}: {}", directory, action, status.ToString());
  // A file that another one names, and that is missing, is an I/O error to it.
  if (status.IsCorruption() || status.IsInvalidArgument() || status.IsNotSupported() ||
      status.IsPathNotFound()) {
    return Damaged(text, directory);
  }
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(text);
  return absl::InternalError(text);
}

rocksdb::DBOptions DatabaseOptions() {
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.paranoid_checks = true;
  // Rows of blobs are written without a log; their marker must not outlive them.
  options.atomic_flush = true;
  options.max_open_files = kOpenFiles;
  options.max_file_opening_threads = 1;
  options.max_background_jobs = 2;
  options.max_total_wal_size = 4 * kWriteBuffer;
  options.db_write_buffer_size = 2 * kWriteBuffer;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.skip_stats_update_on_db_open = true;
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.max_log_file_size = 1 << 20;
  options.keep_log_file_num = 2;
  return options;
}

rocksdb::ColumnFamilyOptions SmallFamily() {
  rocksdb::ColumnFamilyOptions options;
  options.write_buffer_size = kWriteBuffer;
  options.max_write_buffer_number = 2;
  options.compression = rocksdb::kNoCompression;  // digests
  return options;
}

// Found by chunk alone: the filters hold the first half of the key.
rocksdb::ColumnFamilyOptions ChunkFamily() {
  rocksdb::ColumnFamilyOptions options = SmallFamily();
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(kBlockCache);
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  table.whole_key_filtering = false;
  // In pieces, so that a look-up brings 4 KiB of each into the small cache and not megabytes.
  table.index_type = rocksdb::BlockBasedTableOptions::kTwoLevelIndexSearch;
  table.partition_filters = true;
  table.cache_index_and_filter_blocks = true;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  options.prefix_extractor.reset(rocksdb::NewFixedPrefixTransform(kDigestSize));
  return options;
}

class RocksIndex : public NodeIndex {
 public:
  static absl::StatusOr<std::unique_ptr<NodeIndex>> Open(const std::string& directory);

  RocksIndex(std::string directory, UniqueFd lock)
      : directory_(std::move(directory)), lock_(std::move(lock)) {}
  ~RocksIndex() override {
    if (database_ == nullptr) return;
    // What has no log yet would be lost, and what has one would make the next start slow. A failure
    // costs no more than indexing again.
    database_->Flush(rocksdb::FlushOptions(), families_).PermitUncheckedError();
    for (rocksdb::ColumnFamilyHandle* family : families_) {
      database_->DestroyColumnFamilyHandle(family);
    }
  }

  absl::Status AddBlob(const Digest& blob, const ChunkTable& chunks) override;
  absl::StatusOr<bool> HasBlob(const Digest& blob) const override;
  absl::Status RemoveBlob(const Digest& blob, const ChunkTable& chunks) override;
  absl::StatusOr<std::vector<ChunkLocation>> FindChunk(const Digest& chunk,
                                                       const Digest& except) const override;
  absl::Status PutMount(const std::string& id, const std::string& record) override;
  absl::Status RemoveMount(const std::string& id) override;
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Mounts() const override;

 private:
  // In the order in which they are opened; RocksDB insists on the default one.
  enum Family { kDefaultFamily, kChunkFamily, kBlobFamily, kMountFamily };
  rocksdb::ColumnFamilyHandle* family(Family family) const { return families_[family]; }

  // kNone: for what can be built again after a crash.
  enum class Log { kNone, kWrite };
  absl::Status Write(rocksdb::WriteBatch* batch, Log log, std::string_view action);
  // One Put or Delete for each chunk, in batches of bounded size.
  template <typename AddToBatch>
  absl::Status ForEachChunk(const ChunkTable& chunks, std::string_view action,
                            const AddToBatch& add);

  const std::string directory_;
  const UniqueFd lock_;  // released after the database is closed
  std::unique_ptr<rocksdb::DB> database_;
  std::vector<rocksdb::ColumnFamilyHandle*> families_;
  // One writer at a time: RocksDB would join the batches of several into one of unbounded size.
  std::mutex write_mutex_;
};

absl::StatusOr<std::unique_ptr<NodeIndex>> RocksIndex::Open(const std::string& directory) {
  // RocksDB has a lock of its own, but reports it like any other I/O error.
  ASSIGN_OR_RETURN(UniqueFd lock, LockDirectory(directory), "open index");
  // RocksDB as Debian builds it ends the process if it cannot write its first files.
  struct statvfs info {};
  if (::statvfs(directory.c_str(), &info) == 0 && info.f_bavail * info.f_frsize < kMinFree) {
    return absl::ResourceExhaustedError(
        fmt::format("open index {}: no space left on the disk: {} bytes are free, {} needed",
                    directory, info.f_bavail * info.f_frsize, kMinFree));
  }
  // RocksDB's error for this is that of any failed read.
  const std::string current = directory + "/CURRENT";
  struct stat file {};
  if (::lstat(current.c_str(), &file) == 0 && !S_ISREG(file.st_mode)) {
    return Damaged(fmt::format("open index {}: {} is not a file", directory, current), directory);
  }
  auto index = std::make_unique<RocksIndex>(directory, std::move(lock));
  const std::vector<rocksdb::ColumnFamilyDescriptor> families = {
      {rocksdb::kDefaultColumnFamilyName, SmallFamily()},
      {kChunks, ChunkFamily()},
      {kBlobs, SmallFamily()},
      {kMounts, SmallFamily()}};
  rocksdb::DB* database = nullptr;
  const rocksdb::Status status =
      rocksdb::DB::Open(DatabaseOptions(), directory, families, &index->families_, &database);
  index->database_.reset(database);
  RETURN_IF_ERROR(ToStatus(status, directory, "open"));
  return index;
}

absl::Status RocksIndex::Write(rocksdb::WriteBatch* batch, Log log, std::string_view action) {
  std::lock_guard lock(write_mutex_);
  rocksdb::WriteOptions options;
  options.disableWAL = log == Log::kNone;
  options.memtable_insert_hint_per_batch = true;  // batches of chunks are sorted
  // A log is not synced: a machine crash takes the mounts with it that it tells of.
  return ToStatus(database_->Write(options, batch), directory_, action);
}

template <typename AddToBatch>
absl::Status RocksIndex::ForEachChunk(const ChunkTable& chunks, std::string_view action,
                                      const AddToBatch& add) {
  // In the order of the keys, each is found beside the one before it; otherwise a large blob costs
  // several times as much.
  std::vector<uint32_t> sorted(chunks.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  std::sort(sorted.begin(), sorted.end(), [&](uint32_t left, uint32_t right) {
    return std::ranges::lexicographical_compare(chunks[left].digest, chunks[right].digest);
  });
  rocksdb::WriteBatch batch;
  for (const uint32_t i : sorted) {
    add(chunks[i], &batch);
    if (batch.GetDataSize() < kMaxBatch) continue;
    RETURN_IF_ERROR(Write(&batch, Log::kNone, action));
    batch.Clear();
  }
  return Write(&batch, Log::kNone, action);
}

absl::Status RocksIndex::AddBlob(const Digest& blob, const ChunkTable& chunks) {
  constexpr std::string_view kAction = "add blob";
  ASSIGN_OR_RETURN(const bool there, HasBlob(blob));
  if (there) return absl::OkStatus();
  RETURN_IF_ERROR(
      ForEachChunk(chunks, kAction, [&](const ChunkRecord& chunk, rocksdb::WriteBatch* batch) {
        const ChunkValue value{chunk.first_block, chunk.length};
        batch->Put(family(kChunkFamily), ChunkKey(chunk.digest, blob),
                   Slice(reinterpret_cast<const char*>(&value), sizeof(value)));
      }));
  // Comes last and makes it a transaction: without it, what was written is written again.
  rocksdb::WriteBatch marker;
  marker.Put(family(kBlobFamily), AsSlice(blob), Slice());
  return Write(&marker, Log::kNone, kAction);
}

absl::StatusOr<bool> RocksIndex::HasBlob(const Digest& blob) const {
  std::string value;
  const rocksdb::Status status =
      database_->Get(rocksdb::ReadOptions(), family(kBlobFamily), AsSlice(blob), &value);
  if (status.IsNotFound()) return false;
  RETURN_IF_ERROR(ToStatus(status, directory_, "look up blob"));
  return true;
}

absl::Status RocksIndex::RemoveBlob(const Digest& blob, const ChunkTable& chunks) {
  constexpr std::string_view kAction = "remove blob";
  // First, so that a blob with a marker always has all its chunks.
  rocksdb::WriteBatch marker;
  marker.Delete(family(kBlobFamily), AsSlice(blob));
  RETURN_IF_ERROR(Write(&marker, Log::kWrite, kAction));
  return ForEachChunk(chunks, kAction, [&](const ChunkRecord& chunk, rocksdb::WriteBatch* batch) {
    batch->Delete(family(kChunkFamily), ChunkKey(chunk.digest, blob));
  });
}

absl::StatusOr<std::vector<NodeIndex::ChunkLocation>> RocksIndex::FindChunk(
    const Digest& chunk, const Digest& except) const {
  rocksdb::ReadOptions options;
  options.prefix_same_as_start = true;
  const std::unique_ptr<rocksdb::Iterator> iterator(
      database_->NewIterator(options, family(kChunkFamily)));
  std::vector<ChunkLocation> locations;
  for (iterator->Seek(AsSlice(chunk)); iterator->Valid() && locations.size() < kMaxLocations;
       iterator->Next()) {
    ChunkLocation location;
    ChunkValue value;
    if (iterator->key().size() != kChunkKeySize || iterator->value().size() != sizeof(value)) {
      return absl::DataLossError(fmt::format("index {}: record of chunk {} has a wrong size",
                                             directory_, chunk.ToString()));
    }
    std::memcpy(location.blob.bytes.data(), iterator->key().data() + kDigestSize, kDigestSize);
    if (location.blob == except) continue;
    std::memcpy(&value, iterator->value().data(), sizeof(value));
    location.first_block = value.first_block;
    location.length = value.length;
    locations.push_back(location);
  }
  RETURN_IF_ERROR(ToStatus(iterator->status(), directory_, "look up chunk"));
  return locations;
}

absl::Status RocksIndex::PutMount(const std::string& id, const std::string& record) {
  rocksdb::WriteBatch batch;
  batch.Put(family(kMountFamily), id, record);
  return Write(&batch, Log::kWrite, "record mount " + id);
}

absl::Status RocksIndex::RemoveMount(const std::string& id) {
  rocksdb::WriteBatch batch;
  batch.Delete(family(kMountFamily), id);
  return Write(&batch, Log::kWrite, "forget mount " + id);
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> RocksIndex::Mounts() const {
  const std::unique_ptr<rocksdb::Iterator> iterator(
      database_->NewIterator(rocksdb::ReadOptions(), family(kMountFamily)));
  std::vector<std::pair<std::string, std::string>> mounts;
  for (iterator->SeekToFirst(); iterator->Valid(); iterator->Next()) {
    mounts.emplace_back(iterator->key().ToString(), iterator->value().ToString());
  }
  RETURN_IF_ERROR(ToStatus(iterator->status(), directory_, "list mounts"));
  return mounts;
}

// Waits for another index to be opened, and is that one from then on.
class DeferredIndex : public NodeIndex {
 public:
  explicit DeferredIndex(std::string directory)
      : opened_(std::async(std::launch::async,
                           [directory = std::move(directory)] { return Open(directory); })) {}

  absl::Status AddBlob(const Digest& blob, const ChunkTable& chunks) override {
    ASSIGN_OR_RETURN(NodeIndex* const index, Get());
    return index->AddBlob(blob, chunks);
  }
  absl::StatusOr<bool> HasBlob(const Digest& blob) const override {
    ASSIGN_OR_RETURN(const NodeIndex* const index, Get());
    return index->HasBlob(blob);
  }
  absl::Status RemoveBlob(const Digest& blob, const ChunkTable& chunks) override {
    ASSIGN_OR_RETURN(NodeIndex* const index, Get());
    return index->RemoveBlob(blob, chunks);
  }
  absl::StatusOr<std::vector<ChunkLocation>> FindChunk(const Digest& chunk,
                                                       const Digest& except) const override {
    ASSIGN_OR_RETURN(const NodeIndex* const index, Get());
    return index->FindChunk(chunk, except);
  }
  absl::Status PutMount(const std::string& id, const std::string& record) override {
    ASSIGN_OR_RETURN(NodeIndex* const index, Get());
    return index->PutMount(id, record);
  }
  absl::Status RemoveMount(const std::string& id) override {
    ASSIGN_OR_RETURN(NodeIndex* const index, Get());
    return index->RemoveMount(id);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Mounts() const override {
    ASSIGN_OR_RETURN(const NodeIndex* const index, Get());
    return index->Mounts();
  }

 private:
  absl::StatusOr<NodeIndex*> Get() const {
    const absl::StatusOr<std::unique_ptr<NodeIndex>>& index = opened_.get();
    RETURN_IF_ERROR(index.status());
    return index->get();
  }

  const std::shared_future<absl::StatusOr<std::unique_ptr<NodeIndex>>> opened_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NodeIndex>> NodeIndex::Open(const std::string& directory) {
  return RocksIndex::Open(directory);
}

std::unique_ptr<NodeIndex> NodeIndex::OpenInBackground(const std::string& directory) {
  return std::make_unique<DeferredIndex>(directory);
}

}  // namespace lamina::chunkstore
