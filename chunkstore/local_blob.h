// SPDX-License-Identifier: Apache-2.0
//
// What a node keeps of a blob: a directory with its tables, its data file and the bitmap of frames
// (blob_store.h lists the files). Knows nothing of origins.
#ifndef LAMINA_CHUNKSTORE_LOCAL_BLOB_H_
#define LAMINA_CHUNKSTORE_LOCAL_BLOB_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/blob_tables.h"
#include "chunkstore/node_cache.h"
#include "chunkstore/present_map.h"

namespace lamina::chunkstore {

// The parts of a blob that must be on a node before it can be used, decoded. `section_table` is as
// in the object.
struct BlobTables {
  std::string section_table;
  std::string chunks;
  std::string frames;
};

// A blob in the making: its tables, and a file for its metadata. Files of it go with it.
class BlobDraft {
 public:
  // Below `parent`, where the blob is to be, or in memory if that is empty.
  static absl::StatusOr<BlobDraft> Create(const std::string& parent);

  // For the metadata; open for reading and writing.
  int metadata() const { return metadata_.get(); }
  BlobTables tables;

 private:
  friend class LocalBlob;
  std::optional<TemporaryDirectory> directory_;  // with the metadata file; none if in memory
  UniqueFd metadata_;
};

// A blob's directory, as it is found before it is opened.
struct BlobFiles {
  std::string directory;
  Digest key;    // LayerDescriptor::Key()
  Digest layer;  // zeros if the file that tells it is damaged
  uint64_t content_bytes = 0;
  int64_t last_used = 0;       // nanoseconds since 1970
  uint64_t present_bytes = 0;  // see below; not filled in
};
// All blobs in `directory`.
std::vector<BlobFiles> FindBlobFiles(const std::string& directory);
// Bytes of the frames that the bitmap in a blob's directory says are in the data file; what that takes
// on the disk if it is clearly more (LocalBlob::HasLostFrames).
uint64_t PresentBytes(const std::string& directory);
// The descriptor of the blob in such a directory, from its own files. kDataLoss if they are not those
// of a blob of that name.
absl::StatusOr<LayerDescriptor> DescriptorOf(const std::string& directory);
// Whether a directory is what an earlier version kept a blob in, which nothing uses any more.
bool IsOldBlobDirectory(const std::string& directory);

// Thread-safe but for StoreChunks and LoadChunks, which one thread may call.
//
// Only the holder of a frame's flight (fetch_scheduler.h) may check, write or punch it, or change
// its bit.
class LocalBlob {
 public:
  // kNotFound if there is no such directory; kDataLoss if its tables are damaged or belong to another
  // descriptor, and not for want of memory, descriptors or permission. A damaged data file is not an
  // error: its frames are checked on use.
  static absl::StatusOr<std::unique_ptr<LocalBlob>> Open(const std::string& directory,
                                                         const LayerDescriptor& descriptor);

  // A blob whose files are in anonymous memory, gone with the object.
  static absl::StatusOr<std::unique_ptr<LocalBlob>> OpenInMemory(const LayerDescriptor& descriptor,
                                                                 const BlobDraft& draft);

  // Makes the directory of the draft, whole or not at all, and then the draft is empty. Takes over the
  // data of a directory that is in its place if it belongs to the same descriptor; nobody may have it
  // open.
  static absl::Status Create(const std::string& directory, const LayerDescriptor& descriptor,
                             BlobDraft& draft);

  const SectionTable& sections() const { return sections_; }
  const FrameTable& frames() const { return frames_; }
  std::span<const std::byte> metadata() const { return metadata_.bytes(); }
  const Digest& content_digest() const { return content_digest_; }
  int data_fd() const { return data_.get(); }
  bool in_memory() const { return directory_.empty(); }
  uint64_t data_size() const { return data_size_; }
  const PresentMap& present() const { return *present_; }
  // Bytes of the frames that are present.
  uint64_t present_bytes() const { return present_bytes_.load(std::memory_order_relaxed); }
  // Has them counted by `cache` too, from now on.
  void CountIn(std::shared_ptr<NodeCache> cache);
  // Remembers for later processes that the blob is used now.
  void MarkUsed();

  // Reads a frame from the data file into `buffer` (kFrameSize bytes) and returns true if it is
  // right; forgets it if it is not.
  bool CheckFrame(uint32_t frame, std::span<std::byte> buffer);
  // Writes a frame's uncompressed bytes, which the caller has verified, and marks it present.
  absl::Status WriteFrame(uint32_t frame, std::span<const std::byte> bytes);
  // For frames whose bytes were put into the data file by other means.
  void MarkPresent(uint32_t frame);
  // The other way round: takes the mark from a frame, so that its bytes may go. Returns their
  // number, 0 if it was not present.
  uint64_t Forget(uint32_t frame);
  // Gives the blocks of the frames from `first` to before `end`, which are forgotten, back to the
  // file system. They read as zeros then.
  absl::Status Punch(uint32_t first, uint32_t end);

  // The data file takes clearly more than what is present: a crash of the machine, or damage, has left
  // bytes whose bits are gone, which nothing counts and evicts.
  bool HasLostFrames() const;
  // Punches all that is not present. By whoever opened the blob, before anything is fetched.
  absl::Status PunchLostFrames();

  // True if the file system has failed to write some of the data file to its disk since this was last
  // asked: pages that were right may read as something else, zeros for one, once they leave the memory.
  bool WriteBackFailed();
  // True if the data file does not have its size: somebody else has cut it.
  bool WasCut() const;
  // Gives it its size again. What was cut off reads as zeros.
  absl::Status RestoreSize();
  // Lets go of all pages of the data file that are not to be written any more, so that what is read
  // is what the disk has.
  void DropPages();

  // The chunk table from the local file: kNotFound or kDataLoss as above. It lives as long as the
  // blob.
  absl::StatusOr<const ChunkTable*> LoadChunks();
  absl::Status StoreChunks(std::string_view decoded);

 private:
  explicit LocalBlob(std::string directory) : directory_(std::move(directory)) {}
  uint64_t BytesOf(uint32_t frame) const { return uint64_t{frames_[frame].blocks} * kBlockSize; }
  absl::Status OpenTables(const LayerDescriptor& descriptor);
  absl::Status OpenData();

  const std::string directory_;  // empty: in memory
  SectionTable sections_;
  Mapping frames_file_;
  FrameTable frames_;
  Mapping metadata_;
  Digest content_digest_;
  Mapping chunks_file_;
  ChunkTable chunks_;
  UniqueFd data_;
  uint64_t data_size_ = 0;
  std::unique_ptr<PresentMap> present_;
  std::atomic<uint64_t> present_bytes_{0};
  std::shared_ptr<NodeCache> cache_;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_LOCAL_BLOB_H_
