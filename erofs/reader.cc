// SPDX-License-Identifier: Apache-2.0
#include "erofs/reader.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "erofs/format.h"

namespace lamina::erofs {
namespace {

constexpr uint64_t kMaxInodeSize = std::numeric_limits<int64_t>::max();

struct FeatureName {
  uint32_t bit;
  std::string_view name;
};
constexpr FeatureName kUnsupportedFeatures[] = {
    {kFeature48Bit, "48-bit layout"},
    {kFeatureMetabox, "metadata compression (metabox)"},
};
constexpr uint32_t kSupportedFeatures =
    kFeatureLz4Padding | kFeatureCompressionConfigs | kFeatureChunkedFile | kFeatureDeviceTable |
    kFeatureTailPacking | kFeatureFragments | kFeatureXattrPrefixes;

absl::Status CheckFeatures(uint32_t incompat) {
  for (const FeatureName& feature : kUnsupportedFeatures) {
    if (incompat & feature.bit) {
      return absl::UnimplementedError(fmt::format("the image uses {}", feature.name));
    }
  }
  if (const uint32_t unknown = incompat & ~kSupportedFeatures; unknown != 0) {
    return absl::UnimplementedError(
        fmt::format("the image uses unknown incompatible features {:#x}", unknown));
  }
  return absl::OkStatus();
}

Layout LayoutOf(const InodeInfo& inode) { return static_cast<Layout>(inode.layout); }

uint64_t BodyOffset(const InodeInfo& inode) {
  return inode.header_offset + inode.inode_size + inode.xattr_size;
}

// Of a device of unknown length, every block that a number can name.
uint64_t DeviceSize(const Device& device, uint64_t block_size) {
  return (device.blocks == 0 ? uint64_t{1} << 32 : device.blocks) * block_size;
}

absl::Status Corrupt(const InodeInfo& inode, std::string_view what) {
  return absl::DataLossError(fmt::format("inode {}: {}", inode.nid, what));
}

}  // namespace

absl::StatusOr<Reader> Reader::Open(std::span<const std::byte> image) {
  Reader reader;
  reader.image_ = image;
  RETURN_IF_ERROR(reader.ReadSuperBlock(), "EROFS superblock");
  ASSIGN_OR_RETURN(const InodeInfo root, reader.ReadInode(reader.root_), "EROFS root");
  if (!root.is_directory()) return Corrupt(root, "the root is not a directory");
  return reader;
}

absl::Status Reader::ReadSuperBlock() {
  ASSIGN_OR_RETURN(const SuperBlock super, ReadStruct<SuperBlock>(kSuperOffset));
  if (super.magic != kSuperMagic) {
    return absl::DataLossError(fmt::format("magic {:#x}: this is not EROFS", super.magic));
  }
  RETURN_IF_ERROR(CheckFeatures(super.feature_incompat));
  if (super.block_bits < kMinBlockBits || super.block_bits > kMaxBlockBits) {
    return absl::DataLossError(fmt::format("block size of 2^{}", super.block_bits));
  }
  if (super.directory_block_bits != 0) {
    return absl::UnimplementedError(
        fmt::format("directory blocks of 2^{} blocks", super.directory_block_bits));
  }
  block_size_ = 1u << super.block_bits;
  if (super.feature_compat & kFeatureCompatChecksum) {
    ASSIGN_OR_RETURN(const auto bytes,
                     ImageBytes(kSuperOffset, SuperBlockChecksumSize(block_size_)));
    if (const uint32_t checksum = SuperBlockChecksum(bytes); checksum != super.checksum) {
      return absl::DataLossError(
          fmt::format("checksum {:#010x} instead of {:#010x}", checksum, super.checksum));
    }
  }
  if (super.build_time_nsec >= 1'000'000'000) {
    return absl::DataLossError(
        fmt::format("build time with {} nanoseconds", super.build_time_nsec));
  }
  blocks_ = super.blocks;
  meta_offset_ = uint64_t{super.meta_block} * block_size_;
  xattr_offset_ = uint64_t{super.xattr_block} * block_size_;
  inode_count_ = super.inodes;
  build_time_ = {super.build_time, super.build_time_nsec};
  root_ = super.root_nid;
  uuid_ = super.uuid;
  if (super.feature_incompat & kFeatureDeviceTable) {
    RETURN_IF_ERROR(ReadDeviceTable(uint64_t{super.device_slot_offset} * sizeof(DeviceSlot),
                                    super.extra_devices),
                    "device table");
  }
  if (super.feature_incompat & kFeatureXattrPrefixes) {
    const bool packed = (super.feature_incompat & kFeatureFragments) && super.packed_nid != 0 &&
                        !(super.feature_compat & kFeatureCompatPlainXattrPrefixes);
    if (packed) {
      return absl::UnimplementedError("the image uses xattr prefixes in the packed inode");
    }
    RETURN_IF_ERROR(
        ReadLongPrefixes(uint64_t{super.xattr_prefix_start} * 4, super.xattr_prefix_count),
        "xattr prefixes");
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadDeviceTable(uint64_t offset, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(const DeviceSlot slot, ReadStruct<DeviceSlot>(offset + i * sizeof(DeviceSlot)),
                     "device {}", i + 1);
    const std::string_view tag(slot.tag.data(), slot.tag.size());
    devices_.push_back({.tag = std::string(tag.substr(0, tag.find('\0'))), .blocks = slot.blocks});
    unified_blocks_.push_back(slot.unified_block);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const std::byte>> Reader::ImageBytes(uint64_t offset,
                                                              uint64_t length) const {
  if (offset > image_.size() || length > image_.size() - offset) {
    return absl::DataLossError(
        fmt::format("{} bytes at {} of an image of {} bytes", length, offset, image_.size()));
  }
  return image_.subspan(offset, length);
}

absl::StatusOr<InodeInfo> Reader::ReadInode(Nid nid) const {
  if (nid > image_.size() / kInodeSlotSize) {
    return absl::DataLossError(fmt::format("inode {}: outside the image", nid));
  }
  InodeInfo inode;
  inode.nid = nid;
  inode.header_offset = meta_offset_ + nid * kInodeSlotSize;
  ASSIGN_OR_RETURN(const auto compact, ReadStruct<CompactInode>(inode.header_offset), "inode {}",
                   nid);
  if (compact.format & (kInodeFormatBit4 | ~kInodeFormatKnown)) {
    return absl::UnimplementedError(
        fmt::format("inode {}: format {:#x} is not known", nid, compact.format));
  }
  inode.layout = compact.format >> kInodeFormatLayoutShift & kInodeFormatLayoutMask;
  if (inode.layout > static_cast<uint8_t>(Layout::kChunkBased)) {
    return absl::UnimplementedError(
        fmt::format("inode {}: data layout {} is not known", nid, inode.layout));
  }
  inode.mode = compact.mode;
  inode.raw_union = compact.location;
  inode.xattr_size = XattrAreaSize(compact.xattr_count);
  if (compact.format & kInodeFormatExtended) {
    ASSIGN_OR_RETURN(const auto extended, ReadStruct<ExtendedInode>(inode.header_offset),
                     "inode {}", nid);
    inode.inode_size = sizeof(ExtendedInode);
    inode.uid = extended.uid;
    inode.gid = extended.gid;
    inode.links = extended.links;
    inode.mtime = {extended.mtime, extended.mtime_nsec};
    inode.size = extended.size;
  } else {
    inode.inode_size = sizeof(CompactInode);
    inode.uid = compact.uid;
    inode.gid = compact.gid;
    inode.links = compact.links;
    inode.mtime = build_time_;
    if (__builtin_add_overflow(inode.mtime.seconds, compact.mtime, &inode.mtime.seconds)) {
      return Corrupt(inode, "mtime out of range");
    }
    inode.size = compact.size;
  }
  const FileType type = FileTypeOfMode(inode.mode);
  if (type == FileType::kUnknown) {
    return Corrupt(inode, fmt::format("mode {:o} has no file type", inode.mode));
  }
  if (inode.mtime.nanoseconds >= 1'000'000'000) {
    return Corrupt(inode, fmt::format("mtime with {} nanoseconds", inode.mtime.nanoseconds));
  }
  if (inode.size > kMaxInodeSize) return Corrupt(inode, fmt::format("size {}", inode.size));
  if (type == FileType::kCharacterDevice || type == FileType::kBlockDevice) {
    inode.rdev = DecodeDevice(compact.location);
  }
  return inode;
}

absl::StatusOr<Mapped> Reader::Map(const InodeInfo& file, uint64_t offset) const {
  if (offset >= file.size) {
    return absl::OutOfRangeError(
        fmt::format("inode {}: offset {} of {} bytes", file.nid, offset, file.size));
  }
  const uint64_t left = file.size - offset;
  const uint64_t in_block = offset % block_size_;
  switch (LayoutOf(file)) {
    case Layout::kPlain:
      if (file.raw_union == kNullBlock) return Mapped{.kind = Mapped::Kind::kHole, .length = left};
      return Resolve(file, {.kind = Mapped::Kind::kDevice,
                            .offset = uint64_t{file.raw_union} * block_size_ + offset,
                            .length = left});
    case Layout::kInline: {
      // The last block, even a full one, follows the inode.
      const uint64_t tail = (file.size - 1) / block_size_ * block_size_;
      if (offset < tail) {
        return Resolve(file, {.kind = Mapped::Kind::kDevice,
                              .offset = uint64_t{file.raw_union} * block_size_ + offset,
                              .length = tail - offset});
      }
      const Mapped mapped = {
          .kind = Mapped::Kind::kDevice, .offset = BodyOffset(file) + in_block, .length = left};
      RETURN_IF_ERROR(ImageBytes(mapped.offset, left).status(), "inode {}", file.nid);
      return mapped;
    }
    case Layout::kChunkBased:
      return MapChunk(file, offset);
    case Layout::kCompressedFull:
    case Layout::kCompressedCompact:
      break;
  }
  return absl::UnimplementedError(fmt::format("inode {}: its content is compressed", file.nid));
}

absl::StatusOr<Mapped> Reader::MapChunk(const InodeInfo& file, uint64_t offset) const {
  if (file.raw_union & 0xFFFF & ~(kChunkBlockBitsMask | kChunkIndexes)) {
    return absl::UnimplementedError(fmt::format("inode {}: chunk format {:#x} is not known",
                                                file.nid, file.raw_union & 0xFFFF));
  }
  const uint32_t chunk_bits =
      std::countr_zero(block_size_) + (file.raw_union & kChunkBlockBitsMask);
  const uint64_t chunk = offset >> chunk_bits;
  const uint64_t chunk_start = chunk << chunk_bits;
  Mapped mapped = {.kind = Mapped::Kind::kDevice,
                   .length = std::min(uint64_t{1} << chunk_bits, file.size - chunk_start) -
                             (offset - chunk_start)};
  uint32_t block = 0;
  if (file.raw_union & kChunkIndexes) {
    const uint64_t start = AlignUp(BodyOffset(file), sizeof(ChunkIndex));
    if (chunk > image_.size() / sizeof(ChunkIndex)) return Corrupt(file, "chunk index too long");
    ASSIGN_OR_RETURN(const auto index, ReadStruct<ChunkIndex>(start + chunk * sizeof(ChunkIndex)),
                     "inode {}: chunk {}", file.nid, chunk);
    block = index.block;
    // The kernel ignores the bits that no device number has.
    mapped.device = static_cast<uint16_t>(index.device & (std::bit_ceil(devices_.size() + 1) - 1));
  } else {
    const uint64_t start = AlignUp(BodyOffset(file), sizeof(uint32_t));
    if (chunk > image_.size() / sizeof(uint32_t)) return Corrupt(file, "chunk index too long");
    ASSIGN_OR_RETURN(block, ReadStruct<uint32_t>(start + chunk * sizeof(uint32_t)),
                     "inode {}: chunk {}", file.nid, chunk);
  }
  if (block == kNullBlock) return Mapped{.kind = Mapped::Kind::kHole, .length = mapped.length};
  mapped.offset = uint64_t{block} * block_size_ + (offset - chunk_start);
  return Resolve(file, mapped);
}

absl::StatusOr<Mapped> Reader::Resolve(const InodeInfo& file, Mapped mapped) const {
  if (mapped.device == 0) {
    // As in the kernel (erofs_map_dev): a block of the image may stand for one of a device.
    for (size_t i = 0; i < devices_.size(); ++i) {
      const uint64_t start = uint64_t{unified_blocks_[i]} * block_size_;
      const uint64_t size = uint64_t{devices_[i].blocks} * block_size_;
      if (start == 0 || mapped.offset < start || mapped.offset - start >= size) continue;
      mapped.device = static_cast<uint16_t>(i + 1);
      mapped.offset -= start;
      break;
    }
  }
  if (mapped.device > devices_.size()) {
    return Corrupt(file, fmt::format("content on device {} of {}", mapped.device, devices_.size()));
  }
  const uint64_t size =
      mapped.device == 0 ? image_.size() : DeviceSize(devices_[mapped.device - 1], block_size_);
  if (mapped.offset > size || mapped.length > size - mapped.offset) {
    return Corrupt(file, fmt::format("{} bytes at {} of device {}, which has {}", mapped.length,
                                     mapped.offset, mapped.device, size));
  }
  return mapped;
}

uint64_t Reader::ChunkEntries(const InodeInfo& file) const {
  if (LayoutOf(file) != Layout::kChunkBased || file.size == 0) return 0;
  const uint32_t chunk_bits =
      std::countr_zero(block_size_) + (file.raw_union & kChunkBlockBitsMask);
  return ((file.size - 1) >> chunk_bits) + 1;
}

uint64_t Reader::ChunkIndexSize(const InodeInfo& file) const {
  return ChunkEntries(file) *
         (file.raw_union & kChunkIndexes ? sizeof(ChunkIndex) : sizeof(uint32_t));
}

absl::StatusOr<std::vector<Extent>> Reader::ReadExtents(const InodeInfo& file) const {
  // Where the last extent ends on its device.
  const auto end_on_device = [](const Extent& extent) {
    return uint64_t{extent.block} * kBlockSize + extent.length;
  };
  std::vector<Extent> extents;
  uint64_t offset = 0;
  while (offset < file.size) {
    ASSIGN_OR_RETURN(const Mapped mapped, Map(file, offset));
    const uint64_t start = std::exchange(offset, offset + mapped.length);
    if (mapped.kind == Mapped::Kind::kHole) continue;
    Extent* last = extents.empty() ? nullptr : &extents.back();
    if (last != nullptr && last->device == mapped.device && last->offset + last->length == start &&
        end_on_device(*last) == mapped.offset) {
      last->length += mapped.length;
      continue;
    }
    const uint64_t block = mapped.offset / kBlockSize;
    if (mapped.offset % kBlockSize != 0 || start % kBlockSize != 0 ||
        block > std::numeric_limits<uint32_t>::max()) {
      return absl::UnimplementedError(
          fmt::format("inode {}: content at {} is at byte {} of device {}, not in blocks of {}",
                      file.nid, start, mapped.offset, mapped.device, kBlockSize));
    }
    extents.push_back({.offset = start,
                       .length = mapped.length,
                       .device = mapped.device,
                       .block = static_cast<uint32_t>(block)});
  }
  for (const Extent& extent : extents) {
    if (extent.length % kBlockSize != 0 && extent.offset + extent.length != file.size) {
      return absl::UnimplementedError(fmt::format("inode {}: content at {} ends in a block of {}",
                                                  file.nid, extent.offset, kBlockSize));
    }
  }
  return extents;
}

absl::StatusOr<std::span<const std::byte>> Reader::ReadContent(const InodeInfo& inode,
                                                               uint64_t offset,
                                                               uint64_t length) const {
  ASSIGN_OR_RETURN(const Mapped mapped, Map(inode, offset));
  if (mapped.kind != Mapped::Kind::kDevice || mapped.device != 0 || mapped.length < length) {
    return Corrupt(inode, fmt::format("content at {} is not in one piece in the image", offset));
  }
  return ImageBytes(mapped.offset, length);
}

absl::StatusOr<std::string> Reader::ReadLink(const InodeInfo& symlink) const {
  if (!symlink.is_symlink()) {
    return absl::InvalidArgumentError(fmt::format("inode {}: not a symbolic link", symlink.nid));
  }
  if (symlink.size == 0 || symlink.size > kMaxSymlinkLength) {
    return Corrupt(symlink, fmt::format("symbolic link target of {} bytes", symlink.size));
  }
  std::string target;
  while (target.size() < symlink.size) {  // with small blocks it may be in several pieces
    const uint64_t piece =
        std::min<uint64_t>(symlink.size - target.size(), block_size_ - target.size() % block_size_);
    ASSIGN_OR_RETURN(const auto bytes, ReadContent(symlink, target.size(), piece));
    target.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  if (target.find('\0') != std::string::npos) {
    return Corrupt(symlink, "symbolic link target with a NUL");
  }
  return target;
}

}  // namespace lamina::erofs
