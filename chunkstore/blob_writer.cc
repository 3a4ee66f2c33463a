// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/blob_writer.h"

#include <absl/container/flat_hash_set.h>
#include <absl/hash/hash.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "chunkstore/format.h"
#include "chunkstore/frame_pipeline.h"

namespace lamina::chunkstore {
namespace {

constexpr int kMaxJobs = 256;
// Without being told: each takes 1 MiB, and this many outrun the thread that feeds them by far.
constexpr int kMaxDefaultJobs = 64;

uint64_t RoundUpToBlock(uint64_t bytes) {
  return (bytes + kBlockSize - 1) / kBlockSize * kBlockSize;
}

void CopyDigest(const Digest& digest, uint8_t (&into)[32]) {
  std::memcpy(into, digest.bytes.data(), sizeof(into));
}

class FileOutput : public BlobOutput {
 public:
  explicit FileOutput(UniqueFd fd) : fd_(std::move(fd)) {}

  absl::Status Append(std::span<const std::byte> bytes) override {
    RETURN_IF_ERROR(WriteFull(fd_.get(), size_, bytes), "blob");
    size_ += bytes.size();
    return absl::OkStatus();
  }
  absl::Status Finish(const Digest&) override {
    if (::fsync(fd_.get()) != 0) return ErrnoStatus(errno, "sync blob");
    return absl::OkStatus();
  }

 private:
  const UniqueFd fd_;
  uint64_t size_ = 0;
};

// The object: written from start to end, hashed on the way.
class HashedObject {
 public:
  explicit HashedObject(std::unique_ptr<BlobOutput> output) : output_(std::move(output)) {}

  uint64_t size() const { return size_; }

  absl::Status Append(std::span<const std::byte> bytes) {
    RETURN_IF_ERROR(output_->Append(bytes));
    hasher_.Update(bytes);
    size_ += bytes.size();
    return absl::OkStatus();
  }

  absl::StatusOr<Digest> Finish() {
    const Digest digest = hasher_.Finish();
    RETURN_IF_ERROR(output_->Finish(digest));
    return digest;
  }

 private:
  std::unique_ptr<BlobOutput> output_;
  Hasher hasher_;
  uint64_t size_ = 0;
};

// The different chunks, in the order of their blocks, and a set of their indices to find one by its
// digest and length.
class ChunkSet {
 public:
  struct Key {
    const Digest& digest;
    uint32_t length;
  };

  ChunkSet() : indices_(0, Hash{&chunks_}, Equal{&chunks_}) {}
  ChunkSet(const ChunkSet&) = delete;
  ChunkSet& operator=(const ChunkSet&) = delete;

  const std::vector<ChunkRecord>& chunks() const { return chunks_; }
  // Chunks are not looked for afterwards.
  void Replace(std::vector<ChunkRecord> chunks) {
    indices_.clear();
    chunks_ = std::move(chunks);
  }

  std::optional<uint32_t> FindBlock(const Key& key) const {
    const auto found = indices_.find(key);
    if (found == indices_.end()) return std::nullopt;
    return chunks_[*found].first_block;
  }

  void Add(const Key& key, uint32_t first_block) {
    ChunkRecord record{.first_block = first_block, .length = key.length};
    CopyDigest(key.digest, record.digest);
    chunks_.push_back(record);
    indices_.insert(static_cast<uint32_t>(chunks_.size() - 1));
  }

 private:
  // absl::Hash is seeded for each process, so that chunks made for it cannot all fall together.
  struct Hash {
    using is_transparent = void;
    const std::vector<ChunkRecord>* chunks;
    size_t operator()(const Key& key) const { return absl::HashOf(key.digest); }
    size_t operator()(uint32_t index) const {
      Digest digest;
      std::memcpy(digest.bytes.data(), (*chunks)[index].digest, digest.bytes.size());
      return absl::HashOf(digest);
    }
  };
  struct Equal {
    using is_transparent = void;
    const std::vector<ChunkRecord>* chunks;
    bool operator()(uint32_t index, const Key& key) const {
      const ChunkRecord& chunk = (*chunks)[index];
      return chunk.length == key.length &&
             std::memcmp(chunk.digest, key.digest.bytes.data(), sizeof(chunk.digest)) == 0;
    }
    bool operator()(uint32_t a, uint32_t b) const { return a == b; }
  };

  std::vector<ChunkRecord> chunks_;
  absl::flat_hash_set<uint32_t, Hash, Equal> indices_;
};

// The bytes of a section and whether they are a zstd frame.
struct StoredMetadata {
  std::unique_ptr<std::byte[]> buffer;
  std::span<const std::byte> bytes;
  bool compressed = false;
};

// Metadata are stored as they are, in the caller's memory, if a frame would not be smaller, or so
// much smaller that readers would take it for a bomb.
absl::StatusOr<StoredMetadata> CompressMetadata(std::span<const std::byte> metadata, int level) {
  const size_t bound = ZSTD_compressBound(metadata.size());
  // Not cleared: pages that the frame does not reach are never touched.
  auto buffer = std::make_unique_for_overwrite<std::byte[]>(bound);
  const size_t length = ZSTD_compress(buffer.get(), bound, metadata.data(), metadata.size(), level);
  if (ZSTD_isError(length)) {
    return absl::InternalError(fmt::format("compress metadata: {}", ZSTD_getErrorName(length)));
  }
  const bool bomb = metadata.size() / MaxMetadataRatio(metadata.size()) > length;
  if (length >= metadata.size() || bomb) return StoredMetadata{.bytes = metadata};
  const std::span<const std::byte> bytes(buffer.get(), length);
  return StoredMetadata{.buffer = std::move(buffer), .bytes = bytes, .compressed = true};
}

class Writer final : public BlobWriter {
 public:
  explicit Writer(std::unique_ptr<BlobOutput> output) : object_(std::move(output)) {}

  absl::Status Start(int level, int jobs) {
    level_ = level;
    ASSIGN_OR_RETURN(frames_, FramePipeline::Create(level, jobs, [this](const auto& frame) {
                       return WriteFrame(frame);
                     }));
    return absl::OkStatus();
  }

  absl::Status BeginFile(uint64_t size) override {
    RETURN_IF_ERROR(Require(State::kBetweenFiles));
    state_ = State::kInFile;
    file_size_ = size;
    position_ = 0;
    return absl::OkStatus();
  }

  absl::Status Append(std::span<const std::byte> data) override {
    RETURN_IF_ERROR(Require(State::kInFile));
    RETURN_IF_ERROR(CheckFits(data.size()));
    while (!data.empty()) {
      const uint64_t to_cut = kChunkSize - position_ % kChunkSize;
      const auto part = data.first(std::min<uint64_t>(data.size(), to_cut));
      chunk_.insert(chunk_.end(), part.begin(), part.end());
      position_ += part.size();
      data = data.subspan(part.size());
      if (part.size() == to_cut) RETURN_IF_ERROR(EndChunk());
    }
    return absl::OkStatus();
  }

  absl::Status AppendHole(uint64_t length) override {
    RETURN_IF_ERROR(Require(State::kInFile));
    RETURN_IF_ERROR(CheckFits(length));
    const bool ends_file = length == file_size_ - position_;
    if (position_ % kBlockSize != 0 || (length % kBlockSize != 0 && !ends_file)) {
      return absl::InvalidArgumentError(
          fmt::format("hole of {} bytes at {} does not cover whole blocks", length, position_));
    }
    RETURN_IF_ERROR(EndChunk());
    position_ += length;
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Placement>> EndFile() override {
    RETURN_IF_ERROR(Require(State::kInFile));
    if (position_ != file_size_) {
      return absl::InvalidArgumentError(
          fmt::format("file ends after {} of {} bytes", position_, file_size_));
    }
    RETURN_IF_ERROR(EndChunk());
    state_ = State::kBetweenFiles;
    return std::exchange(placements_, {});
  }

  uint32_t blocks() const override { return info_.blocks; }

  Digest content_digest() const override {
    Hasher hasher;
    for (const ChunkRecord& chunk : chunks_.chunks()) {
      hasher.Update(std::as_bytes(std::span(chunk.digest)));
    }
    return hasher.Finish();
  }

  absl::StatusOr<std::vector<MovedBlocks>> Rearrange(const UniqueFd& written,
                                                     std::unique_ptr<BlobOutput> output,
                                                     std::span<const uint32_t> first) override {
    RETURN_IF_ERROR(Require(State::kBetweenFiles));
    state_ = State::kUsedUp;  // unless all of it succeeds
    RETURN_IF_ERROR(SubmitFrame());
    RETURN_IF_ERROR(frames_->Flush());
    Arrangement arrangement = Arrange(frame_records_, chunks_.chunks(), first);

    object_ = HashedObject(std::move(output));
    const std::vector<FrameRecord> old_frames = std::exchange(frame_records_, {});
    frame_end_ = 0;
    std::vector<std::byte> bytes;
    for (const uint32_t index : arrangement.frames) {
      FrameRecord record = old_frames[index];
      bytes.resize(record.length);
      RETURN_IF_ERROR(ReadFull(written.get(), record.offset, bytes), "blob");
      record.offset = object_.size();
      record.first_block = frame_end_;
      RETURN_IF_ERROR(object_.Append(bytes));
      frame_records_.push_back(record);
      frame_end_ += record.blocks;
    }
    std::vector<ChunkRecord> chunks;
    uint32_t block = 0;
    for (const uint32_t index : arrangement.chunks) {
      chunks.push_back(chunks_.chunks()[index]);
      chunks.back().first_block = block;
      block += static_cast<uint32_t>(RoundUpToBlock(chunks.back().length) / kBlockSize);
    }
    chunks_.Replace(std::move(chunks));
    info_.hot_frames = arrangement.in_front;
    state_ = State::kBetweenFiles;
    return std::move(arrangement.moves);
  }

  absl::StatusOr<BlobInfo> Finish(std::span<const std::byte> metadata) override {
    RETURN_IF_ERROR(Require(State::kBetweenFiles));
    state_ = State::kUsedUp;
    RETURN_IF_ERROR(SubmitFrame());
    RETURN_IF_ERROR(frames_->Flush());

    SectionTableRecord table{.magic = kMagic,
                             .version = kVersion,
                             .blocks = info_.blocks,
                             .frames_length = object_.size()};
    ASSIGN_OR_RETURN(table.chunk_table, WriteSection(std::as_bytes(std::span(chunks_.chunks()))));
    ASSIGN_OR_RETURN(table.metadata, WriteMetadata(metadata));
    ASSIGN_OR_RETURN(table.frame_table, WriteSection(std::as_bytes(std::span(frame_records_))));

    info_.section_table_offset = object_.size();
    const auto table_bytes = std::as_bytes(std::span(&table, 1));
    info_.section_table_digest = Digest::Of(table_bytes);
    RETURN_IF_ERROR(object_.Append(table_bytes));
    info_.size = object_.size();
    ASSIGN_OR_RETURN(info_.digest, object_.Finish());
    info_.frames = frame_records_.size();
    info_.chunks = chunks_.chunks().size();
    return info_;
  }

 private:
  enum class State { kBetweenFiles, kInFile, kUsedUp };

  absl::Status Require(State state) const {
    if (state_ == state) return absl::OkStatus();
    return absl::FailedPreconditionError(
        state_ == State::kUsedUp   ? "blob writer was used after Finish or an error"
        : state_ == State::kInFile ? "blob writer: the file begun before was not ended"
                                   : "blob writer: no file was begun");
  }

  absl::Status CheckFits(uint64_t length) const {
    if (length <= file_size_ - position_) return absl::OkStatus();
    return absl::InvalidArgumentError(fmt::format(
        "{} bytes at {} reach past the end of the file at {}", length, position_, file_size_));
  }

  // Ends the chunk whose last byte is at position_, if there is one.
  absl::Status EndChunk() {
    if (chunk_.empty()) return absl::OkStatus();
    state_ = State::kUsedUp;  // unless all of it succeeds
    const auto length = static_cast<uint32_t>(chunk_.size());
    hasher_.Update(chunk_);
    const Digest digest = hasher_.Finish();
    std::optional<uint32_t> block = chunks_.FindBlock({digest, length});
    if (block.has_value()) {
      ++info_.shared_chunks;
    } else {
      ASSIGN_OR_RETURN(block, StoreChunk());
      chunks_.Add({digest, length}, *block);
    }
    AddPlacement({.offset = position_ - length, .length = length, .block = *block});
    info_.content_bytes += length;
    chunk_.clear();
    state_ = State::kInFile;
    return absl::OkStatus();
  }

  // Puts the chunk at the end of the address space and into frames; returns its first block.
  absl::StatusOr<uint32_t> StoreChunk() {
    const uint64_t padded = RoundUpToBlock(chunk_.size());
    const auto blocks = static_cast<uint32_t>(padded / kBlockSize);
    if (blocks > kMaxBlocks - info_.blocks) {
      return absl::ResourceExhaustedError(
          fmt::format("blob holds more than {} blocks of {} bytes", kMaxBlocks, kBlockSize));
    }
    if (frame_fill_ + padded > kFrameSize) RETURN_IF_ERROR(SubmitFrame());
    for (std::span<const std::byte> rest(chunk_); !rest.empty();) {
      const auto part = rest.first(std::min<size_t>(rest.size(), kFrameSize));
      FillFrame(part);
      rest = rest.subspan(part.size());
      if (padded > kFrameSize) RETURN_IF_ERROR(SubmitFrame());
    }
    info_.stored_bytes += chunk_.size();
    return std::exchange(info_.blocks, info_.blocks + blocks);
  }

  void FillFrame(std::span<const std::byte> bytes) {
    const auto room = frames_->buffer().subspan(frame_fill_, RoundUpToBlock(bytes.size()));
    std::memcpy(room.data(), bytes.data(), bytes.size());  // g++ 12 makes std::copy a loop of bytes
    std::ranges::fill(room.subspan(bytes.size()), std::byte{0});
    frame_fill_ += static_cast<uint32_t>(room.size());
  }

  absl::Status SubmitFrame() {
    if (frame_fill_ == 0) return absl::OkStatus();
    return frames_->Submit(std::exchange(frame_fill_, 0));
  }

  absl::Status WriteFrame(const CompressedFrame& frame) {
    FrameRecord record{.offset = object_.size(),
                       .length = static_cast<uint32_t>(frame.bytes.size()),
                       .first_block = frame_end_,
                       .blocks = frame.uncompressed_length / kBlockSize,
                       .checksum = frame.checksum};
    CopyDigest(frame.digest, record.digest);
    RETURN_IF_ERROR(object_.Append(frame.bytes));
    frame_records_.push_back(record);
    frame_end_ += record.blocks;
    return absl::OkStatus();
  }

  void AddPlacement(const Placement& next) {
    if (!placements_.empty()) {
      Placement& last = placements_.back();
      // Only the last chunk of a file can have a length that is no multiple of the block size.
      if (last.offset + last.length == next.offset &&
          last.block + last.length / kBlockSize == next.block) {
        last.length += next.length;
        return;
      }
    }
    placements_.push_back(next);
  }

  absl::StatusOr<SectionRecord> WriteSection(std::span<const std::byte> bytes) {
    if (bytes.size() > kMaxSectionLength) {
      return absl::ResourceExhaustedError(fmt::format(
          "a section of {} bytes, more than the {} allowed", bytes.size(), kMaxSectionLength));
    }
    SectionRecord record{
        .offset = object_.size(), .length = bytes.size(), .uncompressed_length = bytes.size()};
    CopyDigest(Digest::Of(bytes), record.digest);
    RETURN_IF_ERROR(object_.Append(bytes));
    return record;
  }

  absl::StatusOr<SectionRecord> WriteMetadata(std::span<const std::byte> metadata) {
    if (metadata.size() > kMaxMetadataSize) {
      return absl::InvalidArgumentError(fmt::format(
          "metadata of {} bytes, more than the {} allowed", metadata.size(), kMaxMetadataSize));
    }
    ASSIGN_OR_RETURN(const StoredMetadata stored, CompressMetadata(metadata, level_));
    ASSIGN_OR_RETURN(SectionRecord record, WriteSection(stored.bytes));
    record.uncompressed_length = metadata.size();
    record.flags = stored.compressed ? kSectionCompressed : 0;
    return record;
  }

  HashedObject object_;
  int level_ = 0;
  BlobInfo info_;
  ChunkSet chunks_;
  std::vector<FrameRecord> frame_records_;
  uint32_t frame_end_ = 0;   // block behind the last frame written
  uint32_t frame_fill_ = 0;  // bytes in the frame that is being filled, whole blocks
  Hasher hasher_;            // of chunks

  State state_ = State::kBetweenFiles;
  uint64_t file_size_ = 0;
  uint64_t position_ = 0;         // in the file
  std::vector<std::byte> chunk_;  // the chunk that ends at position_, as far as it is known
  std::vector<Placement> placements_;

  // Last, so that its threads end and its sink is silent before anything else goes.
  std::unique_ptr<FramePipeline> frames_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlobWriter>> BlobWriter::Create(UniqueFd output,
                                                               const BlobWriterOptions& options) {
  return Create(std::make_unique<FileOutput>(std::move(output)), options);
}

absl::StatusOr<std::unique_ptr<BlobWriter>> BlobWriter::Create(std::unique_ptr<BlobOutput> output,
                                                               const BlobWriterOptions& options) {
  if (options.level < 1 || options.level > 19) {
    return absl::InvalidArgumentError(
        fmt::format("compression level {} is not 1 to 19", options.level));
  }
  if (options.jobs < 0 || options.jobs > kMaxJobs) {
    return absl::InvalidArgumentError(
        fmt::format("{} compression threads, not 0 to {}", options.jobs, kMaxJobs));
  }
  const int processors = std::clamp<int>(std::thread::hardware_concurrency(), 1, kMaxDefaultJobs);
  auto writer = std::make_unique<Writer>(std::move(output));
  RETURN_IF_ERROR(writer->Start(options.level, options.jobs == 0 ? processors : options.jobs));
  return writer;
}

}  // namespace lamina::chunkstore
