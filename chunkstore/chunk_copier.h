// SPDX-License-Identifier: Apache-2.0
//
// Fills frames of a blob from other blobs of the node that hold the same chunks.
#ifndef LAMINA_CHUNKSTORE_CHUNK_COPIER_H_
#define LAMINA_CHUNKSTORE_CHUNK_COPIER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/data_readers.h"
#include "chunkstore/local_blob.h"
#include "chunkstore/node_index.h"

namespace lamina::chunkstore {

// Thread-safe. The index only says where to look: a chunk is copied if its SHA-256 is right, so it
// does not matter whether the other blob is attached, complete, damaged or being written. Blobs
// that are being evicted from are left alone (data_readers.h): what was right when it was checked
// could be a hole when the file system is asked to share it.
class ChunkCopier {
 public:
  // Blobs are directories below `directory`, named by the digits of their keys
  // (LayerDescriptor::Key()), which are their names in the index too.
  ChunkCopier(std::string directory, std::shared_ptr<NodeIndex> index)
      : directory_(std::move(directory)), index_(std::move(index)) {}

  NodeIndex& index() { return *index_; }

  struct FrameRange {
    uint32_t first = 0;
    uint32_t end = 0;
  };
  // The frame, or all frames of the chunk that it is a part of.
  static FrameRange FramesOfChunk(const ChunkTable& chunks, const FrameTable& frames,
                                  uint32_t frame);

  // Whether another blob than `key` seems to have the first chunk of the frame.
  bool MayHave(const Digest& key, const ChunkTable& chunks, const FrameTable& frames,
               uint32_t frame, const DataReaders& readers);

  // Puts frames of `blob`, whose name is `key`, together from chunks in other blobs and marks them
  // present: those of `range`, which are in FramesOfChunk(frame) and held by the caller. Returns the
  // bytes written, none for those that the file system shares; kNotFound if any chunk is not to be
  // had, which is found out before anything is written. After any other error a part of it was
  // written. `buffer` has kChunkSize bytes. Must be called inside a section of `readers`: the other
  // blobs are read and shared as long as the call takes.
  absl::StatusOr<uint64_t> Copy(const Digest& key, const ChunkTable& chunks, uint32_t frame,
                                FrameRange range, LocalBlob& blob, const DataReaders& readers,
                                std::span<std::byte> buffer);

 private:
  // Blocks of another blob's data file that are blocks of this one.
  struct Piece {
    std::shared_ptr<const UniqueFd> file;
    uint64_t source = 0;  // bytes, as are the others
    uint64_t target = 0;
    uint64_t length = 0;  // of whole blocks
  };

  std::optional<Piece> Find(const Digest& key, const ChunkRecord& chunk,
                            const DataReaders& readers);
  static bool ReadAndCheck(const ChunkRecord& chunk, const Piece& piece, std::span<std::byte> into);
  // Writes one piece to `fd`, sharing blocks where it can; `bytes` is what the piece holds.
  absl::StatusOr<uint64_t> Put(const Piece& piece, std::span<const std::byte> bytes, int fd);

  const std::string directory_;
  const std::shared_ptr<NodeIndex> index_;
  std::atomic<bool> can_share_blocks_{true};  // until the file system says no
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_CHUNK_COPIER_H_
