// SPDX-License-Identifier: Apache-2.0
//
// A layer as a stream of its uncompressed bytes. A thread of the stream's own reads, decompresses
// and hashes ahead of the reader, a few MiB at the most, so that memory stays bounded whatever the
// layer expands to.
#ifndef LAMINA_FS_IMAGE_LAYER_STREAM_H_
#define LAMINA_FS_IMAGE_LAYER_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "chunkstore/base/digest.h"
#include "fs/image/byte_range.h"

namespace lamina::fs {

// Used by one thread.
class LayerStream {
 public:
  // `digest` (if known) is of `file` as it is, `diff_id` of the uncompressed bytes.
  static absl::StatusOr<std::unique_ptr<LayerStream>> Open(ByteRange file,
                                                           const std::optional<Digest>& digest,
                                                           const Digest& diff_id);
  // Stops the thread, wherever it is.
  virtual ~LayerStream() = default;

  // Fills a part of `into` and returns how many bytes, 0 at the end. The end is reached only if
  // both digests are right: a mismatch is an error that has both values. Bytes given before are not
  // verified until then.
  virtual absl::StatusOr<size_t> Read(std::span<std::byte> into) = 0;

  // Bytes of the file consumed so far.
  virtual uint64_t source_bytes_read() const = 0;
  // SHA-256 of the file; after the end only.
  virtual Digest digest() const = 0;
};

// SHA-256 of a file, read in pieces.
absl::StatusOr<Digest> HashFile(const ByteRange& file);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_LAYER_STREAM_H_
