// SPDX-License-Identifier: Apache-2.0
//
// The 512-byte header block of a tar archive: where its fields are and how their values are
// written. Covers the v7, POSIX ustar and GNU layouts (tar(5), POSIX pax "ustar Interchange
// Format").
#ifndef LAMINA_EROFS_TAR_HEADER_H_
#define LAMINA_EROFS_TAR_HEADER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina::erofs {

inline constexpr size_t kTarBlockSize = 512;

struct TarField {
  size_t offset;
  size_t length;
};

inline constexpr TarField kTarName{0, 100};
inline constexpr TarField kTarMode{100, 8};
inline constexpr TarField kTarUid{108, 8};
inline constexpr TarField kTarGid{116, 8};
inline constexpr TarField kTarSize{124, 12};
inline constexpr TarField kTarMtime{136, 12};
inline constexpr TarField kTarChecksum{148, 8};
inline constexpr TarField kTarType{156, 1};
inline constexpr TarField kTarLinkName{157, 100};
inline constexpr TarField kTarMagic{257, 8};
inline constexpr TarField kTarMajor{329, 8};
inline constexpr TarField kTarMinor{337, 8};
inline constexpr TarField kTarPrefix{345, 155};  // ustar only
// GNU sparse files (type 'S'): 4 pairs of offset and length, then what follows. Further pairs are
// in extension blocks of 21 pairs.
inline constexpr TarField kGnuSparsePairs{386, 96};
inline constexpr TarField kGnuIsExtended{482, 1};
inline constexpr TarField kGnuRealSize{483, 12};
inline constexpr TarField kGnuExtensionPairs{0, 504};
inline constexpr TarField kGnuExtensionIsExtended{504, 1};

// The value of a numeric field: octal digits between blanks or NULs (nothing at all is 0), or GNU's
// big-endian two's complement marked by the top bit. Fails on anything else and on what 64 bits
// cannot hold.
absl::StatusOr<int64_t> ParseTarNumber(std::string_view field);

struct TarHeader {
  std::array<char, kTarBlockSize> bytes;

  std::string_view Raw(TarField field) const { return {bytes.data() + field.offset, field.length}; }
  // The field up to its first NUL.
  std::string_view Text(TarField field) const;
  absl::StatusOr<int64_t> Number(TarField field) const { return ParseTarNumber(Raw(field)); }

  char type() const { return bytes[kTarType.offset]; }
  bool is_ustar() const { return Raw(kTarMagic).starts_with(std::string_view("ustar\0", 6)); }
  bool is_gnu() const { return Raw(kTarMagic) == std::string_view("ustar  \0", 8); }
  bool IsZero() const;
  // Sums of signed bytes, as some old programs wrote, are taken too.
  bool ChecksumMatches() const;
};
static_assert(sizeof(TarHeader) == kTarBlockSize);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_TAR_HEADER_H_
