// SPDX-License-Identifier: Apache-2.0
//
// What a node keeps of a blob: a directory with its tables, its data file and the bitmap of frames
// (blob_store.h lists the files). Knows nothing of origins.
#ifndef LAMINA_CHUNKSTORE_LOCAL_BLOB_H_
#define LAMINA_CHUNKSTORE_LOCAL_BLOB_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/blob_tables.h"
#include "chunkstore/present_map.h"

namespace lamina::chunkstore {

// The parts of a blob that must be on a node before it can be used, decoded. `section_table` is as
// in the object.
struct BlobTables {
  std::string section_table;
  std::string frames;
  std::string metadata;
};

// Thread-safe but for StoreChunks and LoadChunks, which one thread may call.
class LocalBlob {
 public:
  // kNotFound if there is no such directory; kDataLoss if its tables are damaged or belong to
  // another descriptor. A damaged data file is not an error: its frames are checked on use.
  static absl::StatusOr<std::unique_ptr<LocalBlob>> Open(const std::string& directory,
                                                         const LayerDescriptor& descriptor);

  // Makes the directory, whole or not at all. Takes over the data of a directory that is in its
  // place if it belongs to the same descriptor; nobody may have it open.
  static absl::Status Create(const std::string& directory, const LayerDescriptor& descriptor,
                             const BlobTables& tables);

  const SectionTable& sections() const { return sections_; }
  const FrameTable& frames() const { return frames_; }
  std::span<const std::byte> metadata() const { return metadata_.bytes(); }
  int data_fd() const { return data_.get(); }
  uint64_t data_size() const { return data_size_; }
  const PresentMap& present() const { return *present_; }

  // Reads a frame from the data file into `buffer` (kFrameSize bytes) and returns true if it is
  // right; forgets it if it is not.
  bool CheckFrame(uint32_t frame, std::span<std::byte> buffer);
  // Writes a frame's uncompressed bytes, which the caller has verified, and marks it present.
  absl::Status WriteFrame(uint32_t frame, std::span<const std::byte> bytes);
  // For frames whose bytes were put into the data file by other means.
  void MarkPresent(uint32_t frame) { present_->Set(frame); }

  // The chunk table from the local file: kNotFound or kDataLoss as above. It lives as long as the
  // blob.
  absl::StatusOr<const ChunkTable*> LoadChunks();
  absl::Status StoreChunks(std::string_view decoded);

 private:
  explicit LocalBlob(std::string directory) : directory_(std::move(directory)) {}
  absl::Status OpenTables(const LayerDescriptor& descriptor);
  absl::Status OpenData();

  const std::string directory_;
  SectionTable sections_;
  Mapping frames_file_;
  FrameTable frames_;
  Mapping metadata_;
  Mapping chunks_file_;
  ChunkTable chunks_;
  UniqueFd data_;
  uint64_t data_size_ = 0;
  std::unique_ptr<PresentMap> present_;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_LOCAL_BLOB_H_
