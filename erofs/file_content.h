// SPDX-License-Identifier: Apache-2.0
//
// Brings the content of one file to a ContentSink in the form the sink asks for: whatever the holes
// of the source are, those given on are aligned and large enough (HoleUnit).
#ifndef LAMINA_EROFS_FILE_CONTENT_H_
#define LAMINA_EROFS_FILE_CONTENT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "erofs/import.h"

namespace lamina::erofs {

// Larger files are refused: 32-bit numbers of 4 KiB blocks, as EROFS has them, reach no further.
inline constexpr uint64_t kMaxFileSize = uint64_t{1} << 44;

class FileContent {
 public:
  // Starts a file of `size` bytes, at most kMaxFileSize. `sink` must outlive the object.
  static absl::StatusOr<FileContent> Begin(ContentSink& sink, uint64_t size);

  // The next bytes of the file, or the next `length` bytes being a hole. Both fail with
  // kInvalidArgument beyond the end of the file.
  absl::Status Append(std::span<const std::byte> data);
  absl::Status AppendHole(uint64_t length);
  // Ends the file. What is left of it is a hole.
  absl::StatusOr<std::vector<Extent>> Finish();

 private:
  FileContent(ContentSink& sink, uint64_t size);

  absl::Status CheckSpace(uint64_t length) const;
  absl::Status FlushHole();
  absl::Status AppendZeros(uint64_t length);

  ContentSink* sink_;
  uint64_t size_;
  uint64_t unit_;
  uint64_t given_ = 0;  // bytes that the sink has
  uint64_t hole_ = 0;   // bytes after those that are a hole, not yet given on
};

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_FILE_CONTENT_H_
