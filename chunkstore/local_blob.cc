// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/local_blob.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

namespace lamina::chunkstore {
namespace {

constexpr char kLayer[] = "/layer";
constexpr char kSections[] = "/sections";
constexpr char kFrames[] = "/frames";
constexpr char kMetadata[] = "/metadata";
constexpr char kChunksFile[] = "/chunks";
constexpr char kChecksums[] = "/checksums";
constexpr char kData[] = "/data";
constexpr char kPresent[] = "/present";

// The file `checksums`: XXH3-64 of what the other files held when they were written. It guards
// against a damaged disk, not against an attacker, who could as well change the process.
struct Checksums {
  uint64_t frames = 0;
  uint64_t metadata = 0;
  uint64_t chunks = 0;
  Digest content;    // ContentDigest() of the chunk table
  uint64_t own = 0;  // of the fields above

  uint64_t Own() const { return XXH3_64bits(this, offsetof(Checksums, own)); }
};
static_assert(sizeof(Checksums) == 64);

uint64_t ChecksumOf(std::string_view content) {
  return XXH3_64bits(content.data(), content.size());
}

absl::StatusOr<Checksums> ReadChecksums(const std::string& directory) {
  const std::string path = directory + kChecksums;
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  Checksums checksums;
  RETURN_IF_ERROR(ReadFull(fd.get(), 0, std::as_writable_bytes(std::span(&checksums, 1))), "{}",
                  path);
  if (checksums.own != checksums.Own()) return absl::DataLossError(path + " is damaged");
  return checksums;
}

std::string_view ChecksumsAsText(const Checksums& checksums) {
  return {reinterpret_cast<const char*>(&checksums), sizeof(checksums)};
}

// Read, not mapped, so that the pages do not count as the process's memory.
absl::StatusOr<uint64_t> ChecksumOfFile(int fd, uint64_t length) {
  constexpr uint64_t kPiece = 128 << 10;
  std::vector<std::byte> buffer(std::min(length, kPiece));
  XXH3_state_t* state = XXH3_createState();
  if (state == nullptr) return absl::ResourceExhaustedError("no memory for a checksum");
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> owner(state, &XXH3_freeState);
  XXH3_64bits_reset(state);
  for (uint64_t done = 0; done < length;) {
    const std::span<std::byte> piece = std::span(buffer).first(std::min(length - done, kPiece));
    RETURN_IF_ERROR(ReadFull(fd, done, piece));
    XXH3_64bits_update(state, piece.data(), piece.size());
    done += piece.size();
  }
  return XXH3_64bits_digest(state);
}

// Maps `length` bytes of a file that must be `file_size` long and match `checksum`.
absl::StatusOr<Mapping> MapChecked(const std::string& path, uint64_t length, uint64_t file_size,
                                   uint64_t checksum) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get()), "{}", path);
  if (size != file_size) {
    return absl::DataLossError(fmt::format("{} has {} bytes instead of {}", path, size, file_size));
  }
  ASSIGN_OR_RETURN(const uint64_t actual, ChecksumOfFile(fd.get(), length), "{}", path);
  if (actual != checksum) return absl::DataLossError(path + " is damaged");
  ASSIGN_OR_RETURN(Mapping mapping, Mapping::OfFile(fd.get(), length, /*writable=*/false), "{}",
                   path);
  return mapping;
}

// Not synced: what a machine crash leaves of it does not match its checksum and is fetched again.
absl::Status WriteNewFile(const std::string& path, std::string_view content) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_WRONLY | O_CREAT | O_TRUNC));
  return Annotate(WriteFull(fd.get(), 0, AsBytes(content)), path);
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, fmt::format("rename {} to {}", from, to));
}

// Whether a data file that takes `taken` bytes holds more than the `present` ones. File systems count
// their extents, and whole blocks of theirs, which may be larger than ours.
bool TakesMore(uint64_t taken, uint64_t present) {
  constexpr uint64_t kOverhead = 1 << 20;
  return taken > present + present / 8 + kOverhead;
}

uint64_t TakenBy(const struct stat& file) { return static_cast<uint64_t>(file.st_blocks) * 512; }

// A file that is longer than it may be is damaged.
absl::StatusOr<std::string> ReadShortFile(const std::string& path, uint64_t limit) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get()), "{}", path);
  if (size > limit) {
    return absl::DataLossError(fmt::format("{} has {} bytes, more than {}", path, size, limit));
  }
  std::string text(size, '\0');
  RETURN_IF_ERROR(ReadFull(fd.get(), 0, std::as_writable_bytes(std::span(text))), "{}", path);
  return text;
}

// Whether a failure to open a blob's files is for want of something else than right content: it says
// nothing of them.
bool MayPass(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsPermissionDenied(status);
}

absl::StatusOr<Digest> ReadLayer(const std::string& directory) {
  constexpr uint64_t kMaxLength = 128;
  ASSIGN_OR_RETURN(const std::string text, ReadShortFile(directory + kLayer, kMaxLength));
  return Digest::Parse(text);
}

// The section table of a directory, if it is the descriptor's.
absl::StatusOr<SectionTable> ReadSections(const std::string& directory,
                                          const LayerDescriptor& descriptor) {
  const std::string path = directory + kSections;
  ASSIGN_OR_RETURN(const std::string bytes, ReadShortFile(path, sizeof(SectionTableRecord)));
  ASSIGN_OR_RETURN(SectionTable sections, SectionTable::Parse(AsBytes(bytes), descriptor), "{}",
                   path);
  return sections;
}

// Checks neither file: it is only counted with.
uint64_t BytesInBitmap(const std::string& directory) {
  constexpr uint64_t kMaxFile = 1 << 30;
  const auto bitmap = ReadFileToString(directory + kPresent, kMaxFile);
  if (!bitmap.ok() || bitmap->find_first_not_of('\0') == std::string::npos) return 0;
  const auto frames = ReadFileToString(directory + kFrames, kMaxFile);
  if (!frames.ok()) return 0;
  const uint64_t count =
      std::min<uint64_t>(bitmap->size() * 8, frames->size() / sizeof(FrameRecord));
  uint64_t bytes = 0;
  for (uint64_t frame = 0; frame < count; ++frame) {
    // Words are little-endian, so bit n of the map is bit n % 8 of byte n / 8.
    if (((*bitmap)[frame / 8] >> (frame % 8) & 1) == 0) continue;
    FrameRecord record{};
    std::memcpy(&record, frames->data() + frame * sizeof(record), sizeof(record));
    bytes += uint64_t{std::min(record.blocks, kBlocksPerFrame)} * kBlockSize;
  }
  return bytes;
}

absl::StatusOr<UniqueFd> NewMemoryFile(uint64_t size) {
  UniqueFd fd(::memfd_create("lamina-blob", MFD_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    return ErrnoStatus(errno, fmt::format("make a file of {} bytes in memory", size));
  }
  return fd;
}

// A file, so that what goes for mappings of files (DropResident) goes for it as well.
absl::StatusOr<Mapping> MapCopy(std::string_view bytes) {
  ASSIGN_OR_RETURN(const UniqueFd fd, NewMemoryFile(bytes.size()));
  RETURN_IF_ERROR(WriteFull(fd.get(), 0, AsBytes(bytes)));
  return Mapping::OfFile(fd.get(), bytes.size(), /*writable=*/false);
}

}  // namespace

std::vector<BlobFiles> FindBlobFiles(const std::string& directory) {
  std::vector<BlobFiles> found;
  std::error_code error;
  std::filesystem::directory_iterator entries(directory, error);
  for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
    const std::string path = entries->path().string();
    const auto key = Digest::Parse("sha256:" + entries->path().filename().string());
    if (!key.ok()) continue;
    const auto fd = OpenFile(path + kSections, O_RDONLY);
    struct stat info {};
    SectionTableRecord record{};
    if (!fd.ok() || ::fstat(fd->get(), &info) != 0 ||
        !ReadFull(fd->get(), 0, std::as_writable_bytes(std::span(&record, 1))).ok()) {
      continue;
    }
    found.push_back(
        {.directory = path,
         .key = *key,
         .layer = ReadLayer(path).value_or(Digest()),
         .content_bytes = uint64_t{record.blocks} * kBlockSize,
         .last_used = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec});
  }
  return found;
}

uint64_t PresentBytes(const std::string& directory) {
  const uint64_t bytes = BytesInBitmap(directory);
  struct stat data {};
  if (::stat((directory + kData).c_str(), &data) != 0) return bytes;
  return TakesMore(TakenBy(data), bytes) ? TakenBy(data) : bytes;
}

absl::StatusOr<LayerDescriptor> DescriptorOf(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::string bytes,
                   ReadShortFile(directory + kSections, sizeof(SectionTableRecord)));
  SectionTableRecord record{};
  if (bytes.size() != sizeof(record)) return absl::DataLossError(directory + ": bad section table");
  std::memcpy(&record, bytes.data(), sizeof(record));
  LayerDescriptor descriptor;
  // There is a blob, so that a file that is not there, or torn, is damage.
  const absl::StatusOr<Digest> layer = ReadLayer(directory);
  if (MayPass(layer.status())) return layer.status();
  if (!layer.ok()) return absl::DataLossError(std::string(layer.status().message()));
  descriptor.digest = *layer;
  // The section table is the last part of the object, behind the frame table.
  descriptor.section_table_offset = record.frame_table.offset + record.frame_table.length;
  descriptor.size = descriptor.section_table_offset + sizeof(record);
  descriptor.section_table_digest = Digest::Of(AsBytes(bytes));
  if (std::filesystem::path(directory).filename() != descriptor.Key().Hex()) {
    return absl::DataLossError(directory + " has the tables of another blob");
  }
  return descriptor;
}

bool IsOldBlobDirectory(const std::string& directory) {
  // They were named by the digest of the layer alone, and had no file to tell it.
  return ::access((directory + kSections).c_str(), F_OK) == 0 &&
         ::access((directory + kLayer).c_str(), F_OK) != 0 && errno == ENOENT;
}

absl::StatusOr<std::unique_ptr<LocalBlob>> LocalBlob::Open(const std::string& directory,
                                                           const LayerDescriptor& descriptor) {
  if (::access(directory.c_str(), F_OK) != 0) return ErrnoStatus(errno, "open " + directory);
  std::unique_ptr<LocalBlob> blob(new LocalBlob(directory));
  if (absl::Status status = blob->OpenTables(descriptor); !status.ok()) {
    if (MayPass(status)) return status;
    return absl::DataLossError(std::string(status.message()));
  }
  RETURN_IF_ERROR(blob->OpenData());
  return blob;
}

absl::Status LocalBlob::OpenTables(const LayerDescriptor& descriptor) {
  ASSIGN_OR_RETURN(sections_, ReadSections(directory_, descriptor));
  ASSIGN_OR_RETURN(const Digest layer, ReadLayer(directory_));
  if (layer != descriptor.digest) return absl::DataLossError(directory_ + kLayer + " is damaged");
  ASSIGN_OR_RETURN(const Checksums checksums, ReadChecksums(directory_));
  const uint64_t frames_length = sections_.frame_table.uncompressed_length;
  ASSIGN_OR_RETURN(frames_file_, MapChecked(directory_ + kFrames, frames_length, frames_length,
                                            checksums.frames));
  ASSIGN_OR_RETURN(frames_, FrameTable::Parse(std::as_const(frames_file_).bytes(), sections_));
  content_digest_ = checksums.content;
  const uint64_t metadata_length = sections_.metadata.uncompressed_length;
  ASSIGN_OR_RETURN(metadata_, MapChecked(directory_ + kMetadata, metadata_length,
                                         PaddedFileSize(metadata_length), checksums.metadata));
  return absl::OkStatus();
}

absl::Status LocalBlob::OpenData() {
  const std::string path = directory_ + kData;
  data_size_ = PaddedFileSize(uint64_t{sections_.blocks} * kBlockSize);
  ASSIGN_OR_RETURN(data_, OpenFile(path, O_RDWR | O_CREAT));
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(data_.get()), "{}", path);
  // What a truncated file has lost is a hole now, which does not match the checksums of its frames.
  if (size != data_size_ && ::ftruncate(data_.get(), static_cast<off_t>(data_size_)) != 0) {
    return ErrnoStatus(errno, fmt::format("set {} to {} bytes", path, data_size_));
  }
  ASSIGN_OR_RETURN(present_, PresentMap::Open(directory_ + kPresent, frames_.size()));
  present_->ForEach([this](uint32_t frame) { present_bytes_ += BytesOf(frame); });
  return absl::OkStatus();
}

absl::StatusOr<BlobDraft> BlobDraft::Create(const std::string& parent) {
  BlobDraft draft;
  if (parent.empty()) {
    ASSIGN_OR_RETURN(draft.metadata_, NewMemoryFile(0));
    return draft;
  }
  ASSIGN_OR_RETURN(draft.directory_, TemporaryDirectory::Create(parent, ".new-"));
  ASSIGN_OR_RETURN(draft.metadata_,
                   OpenFile(draft.directory_->path() + kMetadata, O_RDWR | O_CREAT | O_EXCL));
  return draft;
}

absl::Status LocalBlob::Create(const std::string& directory, const LayerDescriptor& descriptor,
                               BlobDraft& draft) {
  const std::string parent = std::filesystem::path(directory).parent_path();
  const std::string& made = draft.directory_->path();
  ASSIGN_OR_RETURN(TemporaryDirectory removed, TemporaryDirectory::Create(parent, ".old-"));

  const std::string layer = descriptor.digest.ToString();
  const BlobTables& tables = draft.tables;
  ASSIGN_OR_RETURN(const uint64_t metadata_size, FileSize(draft.metadata()));
  Checksums checksums{.frames = ChecksumOf(tables.frames),
                      .chunks = ChecksumOf(tables.chunks),
                      .content = ContentDigest(AsBytes(tables.chunks))};
  ASSIGN_OR_RETURN(checksums.metadata, ChecksumOfFile(draft.metadata(), metadata_size));
  checksums.own = checksums.Own();
  const std::pair<const char*, std::string_view> files[] = {
      {kLayer, layer},
      {kSections, tables.section_table},
      {kFrames, tables.frames},
      {kChunksFile, tables.chunks},
      {kChecksums, ChecksumsAsText(checksums)}};
  for (const auto& [name, content] : files) RETURN_IF_ERROR(WriteNewFile(made + name, content));
  if (::ftruncate(draft.metadata(), static_cast<off_t>(PaddedFileSize(metadata_size))) != 0) {
    return ErrnoStatus(errno, "extend " + made + kMetadata);
  }
  if (::access(directory.c_str(), F_OK) == 0) {
    // Only the exact section table says whose data it is. Data of another one must not be kept, not
    // even checked on use: whoever chose it may have made it match the checksums.
    if (ReadSections(directory, descriptor).ok()) {
      // Either may be missing; the frames are fetched again then.
      Rename(directory + kData, made + kData).IgnoreError();
      Rename(directory + kPresent, made + kPresent).IgnoreError();
    }
    RETURN_IF_ERROR(Rename(directory, removed.path() + "/blob"));
  }
  if (::chmod(made.c_str(), 0755) != 0) return ErrnoStatus(errno, "chmod " + made);
  RETURN_IF_ERROR(Rename(made, directory));
  draft.directory_->Keep();
  draft = BlobDraft();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LocalBlob>> LocalBlob::OpenInMemory(
    const LayerDescriptor& descriptor, const BlobDraft& draft) {
  const BlobTables& tables = draft.tables;
  std::unique_ptr<LocalBlob> blob(new LocalBlob(""));
  ASSIGN_OR_RETURN(blob->sections_, SectionTable::Parse(AsBytes(tables.section_table), descriptor));
  ASSIGN_OR_RETURN(blob->frames_file_, MapCopy(tables.frames));
  ASSIGN_OR_RETURN(blob->frames_,
                   FrameTable::Parse(std::as_const(blob->frames_file_).bytes(), blob->sections_));
  ASSIGN_OR_RETURN(blob->metadata_,
                   Mapping::OfFile(draft.metadata(), blob->sections_.metadata.uncompressed_length,
                                   /*writable=*/false));
  blob->content_digest_ = ContentDigest(AsBytes(tables.chunks));
  blob->data_size_ = PaddedFileSize(uint64_t{blob->sections_.blocks} * kBlockSize);
  ASSIGN_OR_RETURN(blob->data_, NewMemoryFile(blob->data_size_));
  blob->present_ = std::make_unique<PresentMap>(blob->frames_.size());
  return blob;
}

void LocalBlob::CountIn(std::shared_ptr<NodeCache> cache) {
  cache_ = std::move(cache);
  cache_->Add(present_bytes_);
}

// The time of a file that is not written otherwise.
void LocalBlob::MarkUsed() {
  if (directory_.empty()) return;
  // Failing makes it look older than it is.
  ::utimensat(AT_FDCWD, (directory_ + kSections).c_str(), nullptr, 0);
}

void LocalBlob::MarkPresent(uint32_t frame) {
  if (!present_->Set(frame)) return;
  present_bytes_.fetch_add(BytesOf(frame), std::memory_order_relaxed);
  if (cache_ != nullptr) cache_->Add(BytesOf(frame));
}

uint64_t LocalBlob::Forget(uint32_t frame) {
  if (!present_->Clear(frame)) return 0;
  present_bytes_.fetch_sub(BytesOf(frame), std::memory_order_relaxed);
  if (cache_ != nullptr) cache_->Subtract(BytesOf(frame));
  return BytesOf(frame);
}

absl::Status LocalBlob::Punch(uint32_t first, uint32_t end) {
  const uint64_t offset = uint64_t{frames_[first].first_block} * kBlockSize;
  const uint64_t length =
      uint64_t{frames_[end - 1].first_block} * kBlockSize + BytesOf(end - 1) - offset;
  if (::fallocate(data_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(offset), static_cast<off_t>(length)) == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus(errno, fmt::format("punch a hole into {}{}", directory_, kData));
}

bool LocalBlob::HasLostFrames() const {
  struct stat data {};
  return !in_memory() && ::fstat(data_.get(), &data) == 0 &&
         TakesMore(TakenBy(data), present_bytes());
}

absl::Status LocalBlob::PunchLostFrames() {
  for (uint32_t first = 0, end = 0; first < frames_.size(); first = end + 1) {
    for (end = first; end < frames_.size() && !present_->Test(end);) ++end;
    if (end > first) RETURN_IF_ERROR(Punch(first, end));
  }
  return absl::OkStatus();
}

bool LocalBlob::WriteBackFailed() {
  // The wait is for bytes that are not there, so for nothing. Then it tells of errors of the whole file,
  // each once for each time that the file was opened (Linux, fs/sync.c, sync_file_range;
  // mm/filemap.c, file_check_and_advance_wb_err).
  return !in_memory() &&
         ::sync_file_range(data_.get(), static_cast<off_t>(data_size_), 1,
                           SYNC_FILE_RANGE_WAIT_BEFORE) != 0 &&
         errno != ENOSYS;
}

bool LocalBlob::WasCut() const {
  const absl::StatusOr<uint64_t> size = FileSize(data_.get());
  return !size.ok() || *size != data_size_;
}

absl::Status LocalBlob::RestoreSize() {
  if (::ftruncate(data_.get(), static_cast<off_t>(data_size_)) != 0) {
    return ErrnoStatus(errno, fmt::format("set {}{} to {} bytes", directory_, kData, data_size_));
  }
  return absl::OkStatus();
}

void LocalBlob::DropPages() { ::posix_fadvise(data_.get(), 0, 0, POSIX_FADV_DONTNEED); }

bool LocalBlob::CheckFrame(uint32_t frame, std::span<std::byte> buffer) {
  const FrameRecord& record = frames_[frame];
  const std::span<std::byte> bytes = buffer.first(BytesOf(frame));
  const uint64_t offset = uint64_t{record.first_block} * kBlockSize;
  if (ReadFull(data_.get(), offset, bytes).ok() && FrameIsIntact(record, bytes)) return true;
  Forget(frame);
  return false;
}

absl::Status LocalBlob::WriteFrame(uint32_t frame, std::span<const std::byte> bytes) {
  const uint64_t offset = uint64_t{frames_[frame].first_block} * kBlockSize;
  RETURN_IF_ERROR(WriteFull(data_.get(), offset, bytes), "{}", directory_ + kData);
  MarkPresent(frame);
  return absl::OkStatus();
}

absl::StatusOr<const ChunkTable*> LocalBlob::LoadChunks() {
  ASSIGN_OR_RETURN(const Checksums checksums, ReadChecksums(directory_));
  const uint64_t length = sections_.chunk_table.uncompressed_length;
  ASSIGN_OR_RETURN(chunks_file_,
                   MapChecked(directory_ + kChunksFile, length, length, checksums.chunks));
  ASSIGN_OR_RETURN(chunks_,
                   ChunkTable::Parse(std::as_const(chunks_file_).bytes(), sections_, frames_));
  DropResident(chunks_file_.bytes());  // it was read once, to check it
  return &chunks_;
}

absl::Status LocalBlob::StoreChunks(std::string_view decoded) {
  // Neither is synced: what a machine crash leaves of them is noticed, and fetched again.
  RETURN_IF_ERROR(
      WriteFileAtomically(directory_ + kChunksFile, decoded, 0644, Durability::kCached));
  ASSIGN_OR_RETURN(Checksums checksums, ReadChecksums(directory_));
  checksums.chunks = ChecksumOf(decoded);
  checksums.own = checksums.Own();
  return WriteFileAtomically(directory_ + kChecksums, ChecksumsAsText(checksums), 0644,
                             Durability::kCached);
}

}  // namespace lamina::chunkstore
