// SPDX-License-Identifier: Apache-2.0
//
// The header of a gzip member (RFC 1952, section 2.3), which may come in pieces. ISA-L (2.30) reads
// headers too, but takes a right FHCRC for wrong when the header is not all in one piece.
#ifndef LAMINA_FS_IMAGE_GZIP_HEADER_H_
#define LAMINA_FS_IMAGE_GZIP_HEADER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "chunkstore/base/status.h"

namespace lamina::fs {

class GzipHeader {
 public:
  // Takes bytes from the front of `input`, which it shortens, until the header ends; true once it
  // has. kNotFound if the first two bytes are not those of a gzip member.
  absl::StatusOr<bool> Parse(std::span<const std::byte>& input);

  // True after the two bytes that mark a member.
  bool has_magic() const { return part_ != Part::kFixed || length_ >= 2; }

 private:
  enum class Part { kFixed, kExtraLength, kExtra, kName, kComment, kChecksum, kDone };

  absl::Status Add(uint8_t byte);
  absl::Status FinishFixed();
  absl::Status CheckChecksum() const;
  // Goes on to the next part that the flags say is there.
  void Advance();

  Part part_ = Part::kFixed;
  size_t length_ = 0;                // bytes of this part so far
  std::array<uint8_t, 10> bytes_{};  // of a part of fixed length
  uint8_t flags_ = 0;
  size_t extra_length_ = 0;
  uint32_t checksum_ = 0;  // CRC-32 of all parts before the checksum
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_GZIP_HEADER_H_
