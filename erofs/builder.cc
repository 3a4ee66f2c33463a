// SPDX-License-Identifier: Apache-2.0
#include "erofs/builder.h"

#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include "erofs/chunk_map.h"
#include "erofs/directory_writer.h"
#include "erofs/format.h"
#include "erofs/inode_placer.h"
#include "erofs/xattr_table.h"

namespace lamina::erofs {
namespace {

constexpr size_t kMaxDevices = 0xFFFF;
constexpr uint64_t kDeviceTableOffset = kSuperOffset + sizeof(SuperBlock);
static_assert(kDeviceTableOffset % sizeof(DeviceSlot) == 0);

// Unified block numbers count every device, and the image itself, in units of 2 MiB, to which their
// files are padded.
constexpr uint64_t kDevicePadding = (2u << 20) / kBlockSize;

// Of the chunk indexes of all files of an image.
constexpr uint64_t kMaxImageIndexBytes = 512 << 20;
constexpr uint32_t kNotPlanned = 0xFFFFFFFF;

// What is known of an inode before it is written.
struct PlannedInode {
  InodeIndex index = 0;
  uint32_t links = 0;
  XattrTable::Set xattrs;
  ChunkPlan chunks;

  bool extended = false;
  Layout layout = Layout::kPlain;
  uint32_t xattr_size = 0;
  uint64_t size = 0;
  uint64_t position = 0;    // bytes from the start of the inode area
  uint32_t data_block = 0;  // first of its blocks in the data area, if it has any

  uint32_t fixed_size() const { return extended ? sizeof(ExtendedInode) : sizeof(CompactInode); }
  uint64_t body_offset() const { return position + fixed_size() + xattr_size; }
  uint64_t chunk_index_offset() const { return AlignUp(body_offset(), sizeof(ChunkIndex)); }
};

absl::Status CheckInode(const Inode& inode) {
  if (FileTypeOfMode(inode.mode) == FileType::kUnknown) {
    return absl::InvalidArgumentError(fmt::format("mode {:o} has no file type", inode.mode));
  }
  if (inode.mtime.nanoseconds >= 1'000'000'000) {
    return absl::InvalidArgumentError(
        fmt::format("mtime with {} nanoseconds", inode.mtime.nanoseconds));
  }
  if (inode.is_symlink() && (inode.target.empty() || inode.target.size() > kMaxSymlinkLength ||
                             inode.target.find('\0') != std::string::npos)) {
    return absl::InvalidArgumentError(
        fmt::format("symbolic link target of {} bytes: must be 1 to {} without NUL",
                    inode.target.size(), kMaxSymlinkLength));
  }
  if ((S_ISCHR(inode.mode) || S_ISBLK(inode.mode)) && !EncodeDevice(inode.rdev).has_value()) {
    return absl::InvalidArgumentError(
        fmt::format("device number {:#x}: more than 12 bits of major or 20 of minor", inode.rdev));
  }
  return absl::OkStatus();
}

template <typename T>
void Store(std::byte* to, const T& object) {
  std::memcpy(to, &object, sizeof(object));
}

class Builder {
 public:
  Builder(const Tree& tree, const BuildOptions& options) : tree_(tree), options_(options) {}

  absl::StatusOr<std::string> Build() {
    RETURN_IF_ERROR(CheckDevices());
    RETURN_IF_ERROR(PlanInodes());
    xattrs_.Share();
    ChooseBuildTime();
    for (PlannedInode& planned : inodes_) PlaceInode(planned);
    RETURN_IF_ERROR(PlaceAreas());
    Write();
    return std::move(image_);
  }

 private:
  absl::Status CheckDevices() const;

  // Walks the tree breadth first, so that the inodes of a directory come to lie together, and
  // checks everything that can be wrong with it.
  absl::Status PlanInodes();
  absl::Status PlanInode(InodeIndex index);

  void ChooseBuildTime();
  void PlaceInode(PlannedInode& planned);
  absl::Status PlaceAreas();

  void Write();
  void WriteSuperBlock();
  void WriteDeviceTable();
  void WriteInode(const PlannedInode& planned, uint32_t serial);
  void WriteContent(const PlannedInode& planned, std::span<const uint64_t> nids);
  uint32_t Location(const PlannedInode& planned) const;

  std::byte* at(uint64_t offset) { return reinterpret_cast<std::byte*>(image_.data()) + offset; }
  uint64_t Nid(const PlannedInode& planned) const { return planned.position / kInodeSlotSize; }

  const Tree& tree_;
  const BuildOptions& options_;

  std::vector<PlannedInode> inodes_;     // in the order in which they are written
  std::vector<uint32_t> plan_of_inode_;  // indexed by InodeIndex, into inodes_
  absl::flat_hash_map<std::pair<int64_t, uint32_t>, uint64_t> mtime_uses_;
  XattrTable xattrs_;
  Timestamp build_time_;
  InodePlacer placer_;
  uint64_t data_blocks_ = 0;
  uint64_t index_bytes_ = 0;

  // First blocks of the areas.
  uint32_t xattr_block_ = 0;
  uint32_t meta_block_ = 0;
  uint32_t data_block_ = 0;
  uint32_t end_block_ = 0;
  std::string image_;
};

absl::Status Builder::CheckDevices() const {
  if (options_.devices.size() > kMaxDevices) {
    return absl::InvalidArgumentError(
        fmt::format("{} devices (at most {})", options_.devices.size(), kMaxDevices));
  }
  for (const Device& device : options_.devices) {
    if (device.tag.size() > sizeof(DeviceSlot::tag)) {
      return absl::InvalidArgumentError(fmt::format("device tag of {} bytes (at most {}): {}",
                                                    device.tag.size(), sizeof(DeviceSlot::tag),
                                                    device.tag));
    }
  }
  return absl::OkStatus();
}

absl::Status Builder::PlanInodes() {
  plan_of_inode_.assign(tree_.inode_limit(), kNotPlanned);
  inodes_.reserve(tree_.inode_limit());
  RETURN_IF_ERROR(PlanInode(Tree::kRoot), "/");
  for (size_t i = 0; i < inodes_.size(); ++i) {
    const InodeIndex directory = inodes_[i].index;
    if (!tree_.inode(directory).is_directory()) continue;
    const std::vector<DirectoryEntry> entries = EntriesWithDots(tree_, directory);
    inodes_[i].size = DirectorySize(entries);
    for (const DirectoryEntry& entry : entries) {
      uint32_t& plan = plan_of_inode_[entry.inode];
      if (plan == kNotPlanned) {
        RETURN_IF_ERROR(PlanInode(entry.inode), "{}", tree_.PathOf(directory, entry.name));
      }
      ++inodes_[plan].links;  // "." and ".." are links too
    }
  }
  return absl::OkStatus();
}

absl::Status Builder::PlanInode(InodeIndex index) {
  const Inode& inode = tree_.inode(index);
  PlannedInode planned = {.index = index};
  if (inode.is_regular()) planned.size = inode.size;
  if (inode.is_symlink()) planned.size = inode.target.size();
  RETURN_IF_ERROR(CheckInode(inode));
  ASSIGN_OR_RETURN(planned.xattrs, xattrs_.Add(inode.xattrs));
  if (inode.is_regular() && inode.size > 0) {
    ASSIGN_OR_RETURN(planned.chunks, PlanChunks(inode, options_.devices));
    // Files that are all hole but for a byte take next to nothing where they come from.
    index_bytes_ += planned.chunks.entries * sizeof(ChunkIndex);
    if (index_bytes_ > kMaxImageIndexBytes) {
      return absl::ResourceExhaustedError(fmt::format(
          "large files with holes take more than {} bytes of chunk indexes", kMaxImageIndexBytes));
    }
  }
  ++mtime_uses_[{inode.mtime.seconds, inode.mtime.nanoseconds}];
  plan_of_inode_[index] = static_cast<uint32_t>(inodes_.size());
  inodes_.push_back(planned);
  return absl::OkStatus();
}

// Compact inodes have no mtime of their own: the most frequent one saves most.
void Builder::ChooseBuildTime() {
  uint64_t most = 0;
  for (const auto& [time, uses] : mtime_uses_) {
    const Timestamp mtime = {time.first, time.second};
    if (uses > most || (uses == most && mtime < build_time_)) {
      most = uses;
      build_time_ = mtime;
    }
  }
}

void Builder::PlaceInode(PlannedInode& planned) {
  const Inode& inode = tree_.inode(planned.index);
  constexpr uint64_t kMax16 = std::numeric_limits<uint16_t>::max();
  constexpr uint64_t kMax32 = std::numeric_limits<uint32_t>::max();
  planned.extended = inode.uid > kMax16 || inode.gid > kMax16 || planned.links > kMax16 ||
                     planned.size > kMax32 || inode.mtime != build_time_;
  planned.xattr_size = xattrs_.AreaSize(planned.xattrs);
  const uint64_t head_size = planned.fixed_size() + planned.xattr_size;

  if (planned.chunks.entries > 0) {
    planned.layout = Layout::kChunkBased;
    planned.position = placer_.Place(planned.fixed_size(),
                                     AlignUp(head_size, sizeof(ChunkIndex)) +
                                         uint64_t{planned.chunks.entries} * sizeof(ChunkIndex));
    return;
  }
  const bool has_blocks = inode.is_directory() || inode.is_symlink();
  uint64_t blocks = has_blocks ? planned.size / kBlockSize : 0;
  const uint64_t tail_size = has_blocks ? planned.size % kBlockSize : 0;
  // The kernel wants an inline tail in one block, and that of a symbolic link in the block where
  // the inode ends (erofs_fill_symlink). Both hold if the inode with all it has lies in one block.
  if (tail_size > 0 && head_size + tail_size <= kBlockSize) {
    planned.layout = Layout::kInline;
    planned.position = placer_.Place(head_size + tail_size, head_size + tail_size);
  } else {
    planned.position = placer_.Place(planned.fixed_size(), head_size);
    blocks += tail_size > 0;
  }
  if (blocks > 0) {
    planned.data_block = static_cast<uint32_t>(data_blocks_);
    data_blocks_ += blocks;
  }
}

absl::Status Builder::PlaceAreas() {
  uint64_t block = 0;
  const auto take = [&block](uint64_t bytes) {
    return static_cast<uint32_t>(
        std::exchange(block, block + AlignUp(bytes, kBlockSize) / kBlockSize));
  };
  take(kDeviceTableOffset + options_.devices.size() * sizeof(DeviceSlot));
  xattr_block_ = take(xattrs_.shared_size());
  meta_block_ = take(placer_.end());
  data_block_ = take(data_blocks_ * kBlockSize);
  if (block >= kNullBlock) {
    return absl::ResourceExhaustedError(fmt::format("metadata of {} blocks", block));
  }
  end_block_ = static_cast<uint32_t>(block);
  return absl::OkStatus();
}

void Builder::Write() {
  // Room for the padding too that callers append: metadata are not copied for that.
  image_.reserve(AlignUp(uint64_t{end_block_}, kDevicePadding) * kBlockSize);
  image_.resize(uint64_t{end_block_} * kBlockSize, '\0');
  xattrs_.WriteShared(at(uint64_t{xattr_block_} * kBlockSize));
  std::vector<uint64_t> nids(plan_of_inode_.size());
  for (const PlannedInode& planned : inodes_) nids[planned.index] = Nid(planned);
  uint32_t serial = 0;
  for (const PlannedInode& planned : inodes_) {
    WriteInode(planned, ++serial);
    WriteContent(planned, nids);
  }
  WriteDeviceTable();
  WriteSuperBlock();
}

void Builder::WriteInode(const PlannedInode& planned, uint32_t serial) {
  const Inode& inode = tree_.inode(planned.index);
  std::byte* to = at(uint64_t{meta_block_} * kBlockSize + planned.position);
  const uint16_t format =
      static_cast<uint16_t>(static_cast<uint16_t>(planned.layout) << kInodeFormatLayoutShift |
                            (planned.extended ? kInodeFormatExtended : 0));
  const uint16_t xattr_count =
      planned.xattr_size == 0
          ? 0
          : static_cast<uint16_t>((planned.xattr_size - sizeof(XattrHeader)) / 4 + 1);
  if (planned.extended) {
    Store(to, ExtendedInode{
                  .format = format,
                  .xattr_count = xattr_count,
                  .mode = inode.mode,
                  .size = planned.size,
                  .location = Location(planned),
                  .serial = serial,
                  .uid = inode.uid,
                  .gid = inode.gid,
                  .mtime = inode.mtime.seconds,
                  .mtime_nsec = inode.mtime.nanoseconds,
                  .links = planned.links,
              });
  } else {
    Store(to, CompactInode{
                  .format = format,
                  .xattr_count = xattr_count,
                  .mode = inode.mode,
                  .links = static_cast<uint16_t>(planned.links),
                  .size = static_cast<uint32_t>(planned.size),
                  .location = Location(planned),
                  .serial = serial,
                  .uid = static_cast<uint16_t>(inode.uid),
                  .gid = static_cast<uint16_t>(inode.gid),
              });
  }
  xattrs_.WriteArea(planned.xattrs, to + planned.fixed_size());
}

uint32_t Builder::Location(const PlannedInode& planned) const {
  const Inode& inode = tree_.inode(planned.index);
  switch (inode.mode & S_IFMT) {
    case S_IFREG:
      return planned.chunks.entries > 0 ? kChunkIndexes | planned.chunks.block_bits : 0;
    case S_IFDIR:
    case S_IFLNK:
      return data_block_ + planned.data_block;
    case S_IFCHR:
    case S_IFBLK:
      return *EncodeDevice(inode.rdev);
    default:
      return 0;
  }
}

void Builder::WriteContent(const PlannedInode& planned, std::span<const uint64_t> nids) {
  const Inode& inode = tree_.inode(planned.index);
  const uint64_t meta_start = uint64_t{meta_block_} * kBlockSize;
  std::byte* blocks = at((uint64_t{data_block_} + planned.data_block) * kBlockSize);
  std::byte* tail =
      planned.layout == Layout::kInline ? at(meta_start + planned.body_offset()) : nullptr;
  if (inode.is_directory()) {
    WriteDirectory(tree_, EntriesWithDots(tree_, planned.index), nids, blocks, tail);
  } else if (inode.is_symlink()) {
    std::memcpy(tail != nullptr ? tail : blocks, inode.target.data(), inode.target.size());
  } else if (planned.layout == Layout::kChunkBased) {
    WriteChunkIndex(inode, planned.chunks, at(meta_start + planned.chunk_index_offset()));
  }
}

void Builder::WriteDeviceTable() {
  // The unified address space is the image and the devices end to end. Where it leaves 32 bits all
  // that follows gets the last number: there a kernel that was given the image alone finds nothing
  // and reports an I/O error. With 0 it would take metadata for file content.
  uint64_t unified = AlignUp(end_block_, kDevicePadding);
  std::byte* to = at(kDeviceTableOffset);
  for (const Device& device : options_.devices) {
    DeviceSlot slot = {.blocks = device.blocks,
                       .unified_block = static_cast<uint32_t>(
                           std::min<uint64_t>(unified, std::numeric_limits<uint32_t>::max()))};
    std::memcpy(slot.tag.data(), device.tag.data(), device.tag.size());
    Store(to, slot);
    to += sizeof(slot);
    unified += AlignUp(device.blocks, kDevicePadding);
  }
}

void Builder::WriteSuperBlock() {
  SuperBlock super = {
      .magic = kSuperMagic,
      .feature_compat = kFeatureCompatChecksum | kFeatureCompatMtime | kFeatureCompatXattrFilter,
      .block_bits = kBlockBits,
      .root_nid = static_cast<uint16_t>(Nid(inodes_[0])),
      .inodes = inodes_.size(),
      .build_time = build_time_.seconds,
      .build_time_nsec = build_time_.nanoseconds,
      .blocks = end_block_,
      .meta_block = meta_block_,
      .xattr_block = xattr_block_,
      .uuid = options_.uuid,
      .feature_incompat = kFeatureChunkedFile,
  };
  if (!options_.devices.empty()) {
    super.feature_incompat |= kFeatureDeviceTable;
    super.extra_devices = static_cast<uint16_t>(options_.devices.size());
    super.device_slot_offset = kDeviceTableOffset / sizeof(DeviceSlot);
  }
  Store(at(kSuperOffset), super);
  super.checksum = SuperBlockChecksum({at(kSuperOffset), SuperBlockChecksumSize(kBlockSize)});
  Store(at(kSuperOffset), super);
}

}  // namespace

absl::StatusOr<std::string> BuildImage(const Tree& tree, const BuildOptions& options) {
  return Builder(tree, options).Build();
}

}  // namespace lamina::erofs
