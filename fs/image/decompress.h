// SPDX-License-Identifier: Apache-2.0
//
// Decompression of layers and archives: gzip (with ISA-L), zstd, or none, piece by piece in bounded
// memory. What a stream is shows its first bytes; media types are not relied on, as registries hold
// layers whose type and content differ.
#ifndef LAMINA_FS_IMAGE_DECOMPRESS_H_
#define LAMINA_FS_IMAGE_DECOMPRESS_H_

#include <cstddef>
#include <memory>
#include <span>

#include "fs/image/byte_range.h"

namespace lamina::fs {

// Size of the pieces in which files are read and decompressed.
inline constexpr size_t kIoSize = 1 << 20;

enum class Compression { kNone, kGzip, kZstd };

// Looks at the first bytes. kUnimplemented, by name, for formats that OCI layers do not use (xz,
// bzip2, lz4). A tar header counts as uncompressed whatever it starts with.
absl::StatusOr<Compression> DetectCompression(const ByteRange& file);

// One compressed stream. Used by one thread.
class Decompressor {
 public:
  static std::unique_ptr<Decompressor> Create(Compression compression);
  virtual ~Decompressor() = default;

  // Decompresses from the front of `input`, which it shortens by what it used, into `output` (not
  // empty), and returns how many bytes it made. It stops when the input is used up or the output is
  // full; in the latter case there may be more to come without further input.
  absl::StatusOr<size_t> Decompress(std::span<const std::byte>& input, std::span<std::byte> output);
  // To be called at the end of the input: fails if the stream is not complete.
  virtual absl::Status Finish() = 0;

 private:
  virtual absl::StatusOr<size_t> Run(std::span<const std::byte>& input,
                                     std::span<std::byte> output) = 0;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_DECOMPRESS_H_
