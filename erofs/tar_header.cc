// SPDX-License-Identifier: Apache-2.0
#include "erofs/tar_header.h"

#include <algorithm>
#include <limits>

namespace lamina::erofs {
namespace {

constexpr std::string_view kBlanks("\0 ", 2);

absl::StatusOr<int64_t> ParseBinary(std::string_view field) {
  // The first bit is the mark, the second the sign.
  const int first = static_cast<uint8_t>(field[0]);
  __int128 value = (first & 0x3f) - (first & 0x40);
  for (char byte : field.substr(1)) value = value * 256 + static_cast<uint8_t>(byte);
  if (value < std::numeric_limits<int64_t>::min() || value > std::numeric_limits<int64_t>::max()) {
    return absl::OutOfRangeError("base-256 number of more than 64 bits");
  }
  return static_cast<int64_t>(value);
}

}  // namespace

absl::StatusOr<int64_t> ParseTarNumber(std::string_view field) {
  static_assert(kTarSize.length <= sizeof(__int128), "a field fits the accumulator");
  if (!field.empty() && (field[0] & 0x80) != 0) return ParseBinary(field);

  field.remove_prefix(std::min(field.find_first_not_of(kBlanks), field.size()));
  const std::string_view digits = field.substr(0, field.find_first_of(kBlanks));
  int64_t value = 0;
  for (char digit : digits) {
    if (digit < '0' || digit > '7') {
      return absl::InvalidArgumentError(
          fmt::format("byte 0x{:02x} in an octal number", static_cast<uint8_t>(digit)));
    }
    value = value * 8 + (digit - '0');  // 12 digits at most: no overflow
  }
  return value;
}

std::string_view TarHeader::Text(TarField field) const {
  const std::string_view raw = Raw(field);
  return raw.substr(0, raw.find('\0'));
}

bool TarHeader::IsZero() const {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
}

bool TarHeader::ChecksumMatches() const {
  absl::StatusOr<int64_t> expected = Number(kTarChecksum);
  if (!expected.ok()) return false;
  int64_t unsigned_sum = 0;
  int64_t signed_sum = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool in_checksum =
        i >= kTarChecksum.offset && i < kTarChecksum.offset + kTarChecksum.length;
    const char byte = in_checksum ? ' ' : bytes[i];
    unsigned_sum += static_cast<uint8_t>(byte);
    signed_sum += static_cast<int8_t>(byte);
  }
  return *expected == unsigned_sum || *expected == signed_sum;
}

}  // namespace lamina::erofs
