// SPDX-License-Identifier: Apache-2.0
//
// The on-disk structures of EROFS, as Linux defines them in fs/erofs/erofs_fs.h, and the
// conversions that builder and reader share. FORMAT.md says how Lamina uses them. Everything on
// disk is little endian; the structures are copied as they are, so the host must be too.
#ifndef LAMINA_EROFS_FORMAT_H_
#define LAMINA_EROFS_FORMAT_H_

#include <sys/types.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace lamina::erofs {

static_assert(std::endian::native == std::endian::little);

inline constexpr uint32_t kSuperMagic = 0xE0F5E1E2;
inline constexpr uint64_t kSuperOffset = 1024;
inline constexpr uint32_t kMinBlockBits = 9;  // what the kernel accepts with the right page size
inline constexpr uint32_t kMaxBlockBits = 16;
inline constexpr uint32_t kBlockBits = 12;      // what we write
inline constexpr uint32_t kInodeSlotSize = 32;  // unit of a nid
inline constexpr uint32_t kNullBlock = 0xFFFFFFFF;
inline constexpr uint64_t kMaxSymlinkLength = 4095;  // PATH_MAX without the NUL

// Compatible features: a reader may ignore them.
inline constexpr uint32_t kFeatureCompatChecksum = 0x00000001;
inline constexpr uint32_t kFeatureCompatMtime = 0x00000002;
inline constexpr uint32_t kFeatureCompatXattrFilter = 0x00000004;  // kernel 6.6
inline constexpr uint32_t kFeatureCompatPlainXattrPrefixes = 0x00000010;

// Incompatible features: a reader must know them. Some bits have two meanings, told apart by the
// fields they concern.
inline constexpr uint32_t kFeatureLz4Padding = 0x00000001;
inline constexpr uint32_t kFeatureCompressionConfigs = 0x00000002;
inline constexpr uint32_t kFeatureChunkedFile = 0x00000004;  // kernel 5.15
inline constexpr uint32_t kFeatureDeviceTable = 0x00000008;  // kernel 5.16
inline constexpr uint32_t kFeatureTailPacking = 0x00000010;
inline constexpr uint32_t kFeatureFragments = 0x00000020;
inline constexpr uint32_t kFeatureXattrPrefixes = 0x00000040;
inline constexpr uint32_t kFeature48Bit = 0x00000080;
inline constexpr uint32_t kFeatureMetabox = 0x00000100;

struct SuperBlock {
  uint32_t magic;
  uint32_t checksum;  // SuperBlockChecksum() of its block, if kFeatureCompatChecksum is set
  uint32_t feature_compat;
  uint8_t block_bits;
  uint8_t extension_slots;  // the superblock has 128 bytes and 16 more for each
  uint16_t root_nid;
  uint64_t inodes;
  int64_t build_time;  // mtime of compact inodes
  uint32_t build_time_nsec;
  uint32_t blocks;  // of the image itself, without the devices
  uint32_t meta_block;
  uint32_t xattr_block;
  std::array<uint8_t, 16> uuid;
  std::array<char, 16> volume_name;
  uint32_t feature_incompat;
  uint16_t compression;
  uint16_t extra_devices;
  uint16_t device_slot_offset;  // of the device table, in units of sizeof(DeviceSlot)
  uint8_t directory_block_bits;
  uint8_t xattr_prefix_count;
  uint32_t xattr_prefix_start;  // in units of 4 bytes
  uint64_t packed_nid;
  uint8_t xattr_filter_reserved;  // the filter is only valid if this is 0
  std::array<uint8_t, 23> reserved;
};
static_assert(sizeof(SuperBlock) == 128);
static_assert(offsetof(SuperBlock, checksum) == 4);
static_assert(offsetof(SuperBlock, feature_compat) == 8);
static_assert(offsetof(SuperBlock, block_bits) == 12);
static_assert(offsetof(SuperBlock, extension_slots) == 13);
static_assert(offsetof(SuperBlock, root_nid) == 14);
static_assert(offsetof(SuperBlock, inodes) == 16);
static_assert(offsetof(SuperBlock, build_time) == 24);
static_assert(offsetof(SuperBlock, build_time_nsec) == 32);
static_assert(offsetof(SuperBlock, blocks) == 36);
static_assert(offsetof(SuperBlock, meta_block) == 40);
static_assert(offsetof(SuperBlock, xattr_block) == 44);
static_assert(offsetof(SuperBlock, uuid) == 48);
static_assert(offsetof(SuperBlock, volume_name) == 64);
static_assert(offsetof(SuperBlock, feature_incompat) == 80);
static_assert(offsetof(SuperBlock, compression) == 84);
static_assert(offsetof(SuperBlock, extra_devices) == 86);
static_assert(offsetof(SuperBlock, device_slot_offset) == 88);
static_assert(offsetof(SuperBlock, directory_block_bits) == 90);
static_assert(offsetof(SuperBlock, xattr_prefix_count) == 91);
static_assert(offsetof(SuperBlock, xattr_prefix_start) == 92);
static_assert(offsetof(SuperBlock, packed_nid) == 96);
static_assert(offsetof(SuperBlock, xattr_filter_reserved) == 104);

struct DeviceSlot {
  std::array<char, 64> tag;
  uint32_t blocks;
  uint32_t unified_block;  // where the device starts if all are joined into one
  std::array<uint8_t, 56> reserved;
};
static_assert(sizeof(DeviceSlot) == 128);
static_assert(offsetof(DeviceSlot, blocks) == 64);
static_assert(offsetof(DeviceSlot, unified_block) == 68);

// How an inode's data is laid out, bits 1 to 3 of its format field.
enum class Layout : uint8_t {
  kPlain = 0,
  kCompressedFull = 1,
  kInline = 2,  // the last, partial block follows the inode
  kCompressedCompact = 3,
  kChunkBased = 4,
};
inline constexpr uint16_t kInodeFormatExtended = 0x0001;
inline constexpr uint32_t kInodeFormatLayoutShift = 1;
inline constexpr uint16_t kInodeFormatLayoutMask = 0x0007;
inline constexpr uint16_t kInodeFormatBit4 = 0x0010;  // only with the 48-bit layout
inline constexpr uint16_t kInodeFormatKnown = 0x001F;

struct CompactInode {
  uint16_t format;
  uint16_t xattr_count;  // see XattrAreaSize()
  uint16_t mode;
  uint16_t links;
  uint32_t size;
  uint32_t mtime;     // seconds after the build time; before kernel 6.15 reserved, 0
  uint32_t location;  // first block, chunk format or device number
  uint32_t serial;    // inode number for 32-bit stat
  uint16_t uid;
  uint16_t gid;
  uint32_t reserved2;
};
static_assert(sizeof(CompactInode) == 32);
static_assert(offsetof(CompactInode, xattr_count) == 2);
static_assert(offsetof(CompactInode, mode) == 4);
static_assert(offsetof(CompactInode, links) == 6);
static_assert(offsetof(CompactInode, size) == 8);
static_assert(offsetof(CompactInode, mtime) == 12);
static_assert(offsetof(CompactInode, location) == 16);
static_assert(offsetof(CompactInode, serial) == 20);
static_assert(offsetof(CompactInode, uid) == 24);
static_assert(offsetof(CompactInode, gid) == 26);

struct ExtendedInode {
  uint16_t format;
  uint16_t xattr_count;
  uint16_t mode;
  uint16_t reserved1;
  uint64_t size;
  uint32_t location;
  uint32_t serial;
  uint32_t uid;
  uint32_t gid;
  int64_t mtime;
  uint32_t mtime_nsec;
  uint32_t links;
  std::array<uint8_t, 16> reserved2;
};
static_assert(sizeof(ExtendedInode) == 64);
static_assert(offsetof(ExtendedInode, xattr_count) == 2);
static_assert(offsetof(ExtendedInode, mode) == 4);
static_assert(offsetof(ExtendedInode, size) == 8);
static_assert(offsetof(ExtendedInode, location) == 16);
static_assert(offsetof(ExtendedInode, serial) == 20);
static_assert(offsetof(ExtendedInode, uid) == 24);
static_assert(offsetof(ExtendedInode, gid) == 28);
static_assert(offsetof(ExtendedInode, mtime) == 32);
static_assert(offsetof(ExtendedInode, mtime_nsec) == 40);
static_assert(offsetof(ExtendedInode, links) == 44);

// The location field of a chunk-based inode: log2 of the blocks of a chunk, and flags.
inline constexpr uint32_t kChunkBlockBitsMask = 0x001F;
inline constexpr uint32_t kChunkIndexes =
    0x0020;  // ChunkIndex entries, otherwise bare block numbers
inline constexpr uint32_t kChunk48Bit = 0x0040;
inline constexpr uint32_t kMaxChunkBlockBits = 31;

struct ChunkIndex {
  uint16_t block_high;  // only with kChunk48Bit
  uint16_t device;
  uint32_t block;  // kNullBlock: a hole
};
static_assert(sizeof(ChunkIndex) == 8);
static_assert(offsetof(ChunkIndex, device) == 2);
static_assert(offsetof(ChunkIndex, block) == 4);

struct Dirent {
  uint32_t nid_low;  // two halves, so that the structure is 12 bytes
  uint32_t nid_high;
  uint16_t name_offset;  // in the directory block
  uint8_t type;          // FileType
  uint8_t reserved;

  uint64_t nid() const { return uint64_t{nid_high} << 32 | nid_low; }
};
static_assert(sizeof(Dirent) == 12);
static_assert(offsetof(Dirent, name_offset) == 8);
static_assert(offsetof(Dirent, type) == 10);

enum class FileType : uint8_t {
  kUnknown = 0,
  kRegular = 1,
  kDirectory = 2,
  kCharacterDevice = 3,
  kBlockDevice = 4,
  kFifo = 5,
  kSocket = 6,
  kSymlink = 7,
};

// Starts the xattr area of an inode; shared xattr ids follow, then inline entries.
struct XattrHeader {
  uint32_t name_filter;  // see XattrFilterBit()
  uint8_t shared_count;
  std::array<uint8_t, 7> reserved;
};
static_assert(sizeof(XattrHeader) == 12);
static_assert(offsetof(XattrHeader, shared_count) == 4);

// Followed by name and value, padded to 4 bytes.
struct XattrEntry {
  uint8_t name_length;
  uint8_t prefix;  // XattrPrefix
  uint16_t value_size;
};
static_assert(sizeof(XattrEntry) == 4);
static_assert(offsetof(XattrEntry, prefix) == 1);
static_assert(offsetof(XattrEntry, value_size) == 2);

inline constexpr uint8_t kXattrLongPrefix =
    0x80;  // the other bits index the table of long prefixes

// The number of 4-byte units after the 12-byte header, plus one; 0 means no xattr area.
constexpr uint32_t XattrAreaSize(uint16_t xattr_count) {
  return xattr_count == 0 ? 0 : sizeof(XattrHeader) + 4u * (xattr_count - 1u);
}
inline constexpr uint32_t kMaxXattrAreaSize = XattrAreaSize(0xFFFF);

constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// CRC32C over the block of the superblock from byte 1024 on (for blocks of up to 1 KiB: over as
// much as a block), with the checksum field zero, starting from all ones and not inverted at the
// end. `bytes` is that area as it is on disk.
uint32_t SuperBlockChecksum(std::span<const std::byte> bytes);
// How many bytes it covers.
constexpr uint64_t SuperBlockChecksumSize(uint64_t block_size) {
  return block_size > kSuperOffset ? block_size - kSuperOffset : block_size;
}

FileType FileTypeOfMode(mode_t mode);

// Linux's 32-bit device numbers: 12 bits of major, 20 of minor. Nothing if it does not fit.
std::optional<uint32_t> EncodeDevice(dev_t device);
dev_t DecodeDevice(uint32_t encoded);

// A full xattr name as it is stored.
struct XattrName {
  uint8_t prefix = 0;
  std::string_view suffix;
};
// Nothing for a name outside the name spaces that EROFS has.
std::optional<XattrName> SplitXattrName(std::string_view name);
// The text of a prefix ("user."), or nothing if there is no such prefix.
std::optional<std::string_view> XattrPrefixText(uint8_t prefix);

// The bit in XattrHeader::name_filter that is 0 if a name may be among the inode's xattrs.
uint32_t XattrFilterBit(const XattrName& name);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_FORMAT_H_
