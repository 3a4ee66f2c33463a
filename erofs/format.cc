// SPDX-License-Identifier: Apache-2.0
#include "erofs/format.h"

#include <isa-l/crc.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <xxhash.h>

#include <cstring>
#include <vector>

namespace lamina::erofs {
namespace {

struct Prefix {
  uint8_t index;
  std::string_view text;
  bool whole_name;  // nothing may follow
};

constexpr Prefix kPrefixes[] = {
    {1, "user.", false},
    {2, "system.posix_acl_access", true},
    {3, "system.posix_acl_default", true},
    {4, "trusted.", false},
    {6, "security.", false},
};

constexpr uint32_t kXattrFilterSeed = 0x25BBE08F;

}  // namespace

uint32_t SuperBlockChecksum(std::span<const std::byte> bytes) {
  std::vector<unsigned char> copy(bytes.size());
  std::memcpy(copy.data(), bytes.data(), bytes.size());
  std::memset(copy.data() + offsetof(SuperBlock, checksum), 0, sizeof(SuperBlock::checksum));
  return crc32_iscsi(copy.data(), static_cast<int>(copy.size()), 0xFFFFFFFF);
}

FileType FileTypeOfMode(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFREG:
      return FileType::kRegular;
    case S_IFDIR:
      return FileType::kDirectory;
    case S_IFCHR:
      return FileType::kCharacterDevice;
    case S_IFBLK:
      return FileType::kBlockDevice;
    case S_IFIFO:
      return FileType::kFifo;
    case S_IFSOCK:
      return FileType::kSocket;
    case S_IFLNK:
      return FileType::kSymlink;
    default:
      return FileType::kUnknown;
  }
}

std::optional<uint32_t> EncodeDevice(dev_t device) {
  const uint32_t major_number = major(device);
  const uint32_t minor_number = minor(device);
  if (major_number > 0xFFF || minor_number > 0xFFFFF) return std::nullopt;
  return (minor_number & 0xFF) | (major_number << 8) | ((minor_number & ~0xFFu) << 12);
}

dev_t DecodeDevice(uint32_t encoded) {
  return makedev((encoded & 0xFFF00) >> 8, (encoded & 0xFF) | ((encoded >> 12) & 0xFFF00));
}

std::optional<XattrName> SplitXattrName(std::string_view name) {
  for (const Prefix& prefix : kPrefixes) {
    if (!name.starts_with(prefix.text)) continue;
    const std::string_view suffix = name.substr(prefix.text.size());
    if (suffix.empty() != prefix.whole_name) return std::nullopt;
    return XattrName{prefix.index, suffix};
  }
  return std::nullopt;
}

std::optional<std::string_view> XattrPrefixText(uint8_t index) {
  for (const Prefix& prefix : kPrefixes) {
    if (prefix.index == index) return prefix.text;
  }
  return std::nullopt;
}

uint32_t XattrFilterBit(const XattrName& name) {
  return 1u << (XXH32(name.suffix.data(), name.suffix.size(), kXattrFilterSeed + name.prefix) % 32);
}

}  // namespace lamina::erofs
