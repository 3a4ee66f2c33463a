// SPDX-License-Identifier: Apache-2.0
#include "fs/image/gzip_header.h"

#include <isa-l/crc.h>

namespace lamina::fs {
namespace {

constexpr uint8_t kMagic[] = {0x1f, 0x8b};
constexpr uint8_t kDeflate = 8;
// Bits of the FLG byte; FTEXT (1) says nothing about the format.
constexpr uint8_t kHeaderChecksum = 2;
constexpr uint8_t kExtra = 4;
constexpr uint8_t kName = 8;
constexpr uint8_t kComment = 16;
constexpr uint8_t kReserved = 0xe0;

}  // namespace

absl::StatusOr<bool> GzipHeader::Parse(std::span<const std::byte>& input) {
  while (part_ != Part::kDone && !input.empty()) {
    RETURN_IF_ERROR(Add(std::to_integer<uint8_t>(input[0])));
    input = input.subspan(1);
  }
  return part_ == Part::kDone;
}

absl::Status GzipHeader::Add(uint8_t byte) {
  if (length_ < bytes_.size()) bytes_[length_] = byte;
  ++length_;
  if (part_ != Part::kChecksum) checksum_ = crc32_gzip_refl(checksum_, &byte, 1);
  switch (part_) {
    case Part::kFixed:
      if (length_ <= 2 && byte != kMagic[length_ - 1]) return absl::NotFoundError("not gzip");
      if (length_ == bytes_.size()) return FinishFixed();
      break;
    case Part::kExtraLength:
      if (length_ == 2) {
        extra_length_ = bytes_[0] | bytes_[1] << 8;
        Advance();
      }
      break;
    case Part::kExtra:
      if (length_ == extra_length_) Advance();
      break;
    case Part::kName:
    case Part::kComment:
      if (byte == 0) Advance();
      break;
    case Part::kChecksum:
      if (length_ == 2) {
        RETURN_IF_ERROR(CheckChecksum());
        Advance();
      }
      break;
    case Part::kDone:
      break;
  }
  return absl::OkStatus();
}

absl::Status GzipHeader::FinishFixed() {
  if (bytes_[2] != kDeflate) {
    return absl::DataLossError(fmt::format("gzip: unknown compression method {}", bytes_[2]));
  }
  flags_ = bytes_[3];
  if ((flags_ & kReserved) != 0) {
    return absl::DataLossError(fmt::format("gzip: reserved flags are set ({:#x})", flags_));
  }
  Advance();
  return absl::OkStatus();
}

absl::Status GzipHeader::CheckChecksum() const {
  const uint32_t stored = bytes_[0] | bytes_[1] << 8;
  if (stored == (checksum_ & 0xffff)) return absl::OkStatus();
  return absl::DataLossError("gzip: header checksum mismatch");
}

void GzipHeader::Advance() {
  length_ = 0;
  const auto has = [this](uint8_t flag) { return (flags_ & flag) != 0; };
  switch (part_) {
    case Part::kFixed:
      part_ = Part::kExtraLength;
      if (has(kExtra)) return;
      [[fallthrough]];
    case Part::kExtraLength:
      part_ = Part::kExtra;
      if (has(kExtra) && extra_length_ != 0) return;
      [[fallthrough]];
    case Part::kExtra:
      part_ = Part::kName;
      if (has(kName)) return;
      [[fallthrough]];
    case Part::kName:
      part_ = Part::kComment;
      if (has(kComment)) return;
      [[fallthrough]];
    case Part::kComment:
      part_ = Part::kChecksum;
      if (has(kHeaderChecksum)) return;
      [[fallthrough]];
    case Part::kChecksum:
    case Part::kDone:
      part_ = Part::kDone;
  }
}

}  // namespace lamina::fs
