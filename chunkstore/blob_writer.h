// SPDX-License-Identifier: Apache-2.0
//
// Writes a layer blob: file content cut into chunks, equal chunks kept once, neighbours packed into
// compressed frames, tables and metadata behind them (FORMAT.md). The bytes depend on the content,
// its order and the compression level alone, never on the number of threads.
#ifndef LAMINA_CHUNKSTORE_BLOB_WRITER_H_
#define LAMINA_CHUNKSTORE_BLOB_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"
#include "chunkstore/blob_output.h"
#include "chunkstore/rearrange.h"

namespace lamina::chunkstore {

// zstd level. Processor time of the writer (hashes included) and size of the blob, for the
// libraries and for the small files (/usr/share) of a Debian system on one core of an EPYC:
//   level 1   2.5 and 3.6 ns a byte   26.9 % and 31.6 %
//   level 2   2.8 and 3.8             25.8 % and 30.9 %
//   level 3   3.4 and 4.3             25.2 % and 30.7 %
// The whole conversion of a gzip layer takes 6.3, 6.9 and 8.1 ns a byte of content, so level 1 alone
// leaves two cores room above 300 MB/s.
inline constexpr int kDefaultLevel = 1;

struct BlobWriterOptions {
  int level = kDefaultLevel;  // 1 to 19
  int jobs = 0;  // compression threads, at most 256; 0: one for each processor, up to 64
};

// Where a part of a file was put: `length` bytes of the file from `offset` on begin at `block` of
// the blob's address space (units of 4 KiB) and are contiguous there.
struct Placement {
  uint64_t offset = 0;
  uint64_t length = 0;
  uint32_t block = 0;
  bool operator==(const Placement&) const = default;
};

// What a finished blob is; enough to open it again (see LayerDescriptor in blob_tables.h).
struct BlobInfo {
  Digest digest;  // of the whole object
  uint64_t size = 0;
  uint64_t section_table_offset = 0;
  Digest section_table_digest;
  uint32_t blocks = 0;  // length of the address space
  uint64_t frames = 0;
  uint32_t hot_frames = 0;     // the first ones, which Rearrange has put there
  uint64_t chunks = 0;         // different ones
  uint64_t shared_chunks = 0;  // further uses of a chunk already stored
  uint64_t content_bytes = 0;  // of all files, before sharing
  uint64_t stored_bytes = 0;   // of the different chunks, before compression
};

// Used by one thread; compresses on threads of its own. Memory is bounded by a fixed number of
// frames in flight, plus about 50 bytes for each different chunk.
class BlobWriter {
 public:
  // Writes to `output`, an empty file open for writing. The caller removes it if anything fails.
  static absl::StatusOr<std::unique_ptr<BlobWriter>> Create(UniqueFd output,
                                                            const BlobWriterOptions& options);
  // Writes to any other output.
  static absl::StatusOr<std::unique_ptr<BlobWriter>> Create(std::unique_ptr<BlobOutput> output,
                                                            const BlobWriterOptions& options);
  virtual ~BlobWriter() = default;

  // One file: BeginFile, Append and AppendHole in order until `size` bytes are accounted for,
  // EndFile, which gives the placements, ascending and joined where they continue each other. Holes
  // start at a multiple of 4 KiB and are one in length unless they end the file.
  virtual absl::Status BeginFile(uint64_t size) = 0;
  virtual absl::Status Append(std::span<const std::byte> data) = 0;
  virtual absl::Status AppendHole(uint64_t length) = 0;
  virtual absl::StatusOr<std::vector<Placement>> EndFile() = 0;

  // Length of the address space so far.
  virtual uint32_t blocks() const = 0;
  // SHA-256 over the digests of the stored chunks in order: a name for the content alone, used
  // where something inside the blob must name the blob.
  virtual Digest content_digest() const = 0;

  // Goes on with another output, in which the frames `first` come first and the others behind them in
  // their old order (rearrange.h). Once, when all files are written. `written` is the file that Create
  // was given, open for reading; it is not used again. The placements given so far are those before
  // the move; content_digest() is that of the new order.
  virtual absl::StatusOr<std::vector<MovedBlocks>> Rearrange(const UniqueFd& written,
                                                             std::unique_ptr<BlobOutput> output,
                                                             std::span<const uint32_t> first) = 0;

  // Flushes, writes tables and `metadata` (stored compressed) and syncs. The writer is used up.
  virtual absl::StatusOr<BlobInfo> Finish(std::span<const std::byte> metadata) = 0;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_BLOB_WRITER_H_
