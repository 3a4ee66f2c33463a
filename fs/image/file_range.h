// SPDX-License-Identifier: Apache-2.0
//
// A part of an open file: a blob in a layout directory is all of one, a member of an archive is a
// stretch of one. Reading an image in place, whatever holds it, needs no more than this.
#ifndef LAMINA_FS_IMAGE_FILE_RANGE_H_
#define LAMINA_FS_IMAGE_FILE_RANGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "chunkstore/base/file.h"

namespace lamina::fs {

// A small value that shares the descriptor. Reads use pread(2): any number of threads may read.
struct FileRange {
  std::shared_ptr<const UniqueFd> file;
  uint64_t offset = 0;
  uint64_t size = 0;

  // A regular file, whole. Nothing else is opened: a FIFO or device would hang or surprise.
  static absl::StatusOr<FileRange> Open(const std::string& path);

  // Fills `into` from `position` (relative to the range) on; kDataLoss outside of it.
  absl::Status Read(uint64_t position, std::span<std::byte> into) const;
  // All of it; kResourceExhausted if that is more than `limit` bytes.
  absl::StatusOr<std::string> ReadAll(uint64_t limit) const;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_FILE_RANGE_H_
