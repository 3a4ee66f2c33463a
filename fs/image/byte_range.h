// SPDX-License-Identifier: Apache-2.0
//
// A stretch of bytes that lie somewhere: a blob in a layout directory is all of a file, a member of an
// archive is a part of one, a layer in a registry comes over the network. Reading an image in place,
// whatever holds it, needs no more than this.
#ifndef LAMINA_FS_IMAGE_BYTE_RANGE_H_
#define LAMINA_FS_IMAGE_BYTE_RANGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "chunkstore/base/file.h"

namespace lamina::fs {

// Where bytes are read from. Any number of threads may read.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fills `into` from `offset` on, or fails.
  virtual absl::Status Read(uint64_t offset, std::span<std::byte> into) const = 0;
};

// A small value that shares the source.
struct ByteRange {
  std::shared_ptr<const ByteSource> source;
  uint64_t offset = 0;
  uint64_t size = 0;

  // A regular file, whole. Nothing else is opened: a FIFO or device would hang or surprise.
  static absl::StatusOr<ByteRange> Open(const std::string& path);
  // The first `size` bytes of a file.
  static ByteRange OfFile(UniqueFd file, uint64_t size);

  // A part of this range.
  ByteRange Part(uint64_t position, uint64_t length) const {
    return {source, offset + position, length};
  }
  // Fills `into` from `position` (relative to the range) on; kDataLoss outside of it.
  absl::Status Read(uint64_t position, std::span<std::byte> into) const;
  // All of it; kResourceExhausted if that is more than `limit` bytes.
  absl::StatusOr<std::string> ReadAll(uint64_t limit) const;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_BYTE_RANGE_H_
