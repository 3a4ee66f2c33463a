// SPDX-License-Identifier: Apache-2.0
//
// Directories. Each block of one is a unit: its entries, then their names. Positions are those of
// the kernel's readdir: the byte offset of the entry in the directory.
#include <dirent.h>

#include <algorithm>
#include <cstring>

#include "erofs/format.h"
#include "erofs/reader.h"

namespace lamina::erofs {
namespace {

uint8_t DirentType(uint8_t file_type) {
  switch (static_cast<FileType>(file_type)) {
    case FileType::kRegular:
      return DT_REG;
    case FileType::kDirectory:
      return DT_DIR;
    case FileType::kCharacterDevice:
      return DT_CHR;
    case FileType::kBlockDevice:
      return DT_BLK;
    case FileType::kFifo:
      return DT_FIFO;
    case FileType::kSocket:
      return DT_SOCK;
    case FileType::kSymlink:
      return DT_LNK;
    case FileType::kUnknown:
      break;
  }
  return DT_UNKNOWN;
}

}  // namespace

struct Reader::DirectoryBlock {
  std::span<const std::byte> bytes;
  size_t entries = 0;
  Nid directory = 0;
  uint64_t start = 0;  // position of the block in the directory

  Dirent At(size_t index) const {
    Dirent dirent;
    std::memcpy(&dirent, bytes.data() + index * sizeof(Dirent), sizeof(Dirent));
    return dirent;
  }

  absl::StatusOr<std::string_view> NameAt(size_t index) const {
    const size_t begin = At(index).name_offset;
    const bool last = index + 1 == entries;
    const size_t limit = last ? bytes.size() : At(index + 1).name_offset;
    if (begin < entries * sizeof(Dirent) || begin >= limit || limit > bytes.size()) {
      return Corrupt(index, fmt::format("name from {} to {} in a block of {} bytes", begin, limit,
                                        bytes.size()));
    }
    std::string_view name(reinterpret_cast<const char*>(bytes.data()) + begin, limit - begin);
    if (last) name = name.substr(0, name.find('\0'));  // the rest of the block is padding
    if (name.empty() || name.size() > kMaxNameLength || name.find('\0') != name.npos ||
        name.find('/') != name.npos) {
      return Corrupt(index, fmt::format("{} bytes are not a file name", name.size()));
    }
    return name;
  }

  absl::Status Corrupt(size_t index, std::string_view what) const {
    return absl::DataLossError(fmt::format("directory {}: entry at {}: {}", directory,
                                           start + index * sizeof(Dirent), what));
  }
};

absl::StatusOr<Reader::DirectoryBlock> Reader::ReadDirectoryBlock(const InodeInfo& directory,
                                                                  uint64_t block) const {
  if (!directory.is_directory()) {
    return absl::InvalidArgumentError(fmt::format("inode {}: not a directory", directory.nid));
  }
  DirectoryBlock result;
  result.directory = directory.nid;
  result.start = block * block_size_;
  const uint64_t size = std::min<uint64_t>(directory.size - result.start, block_size_);
  ASSIGN_OR_RETURN(result.bytes, ReadContent(directory, result.start, size), "directory {}",
                   directory.nid);
  // The first name begins where the entries end.
  if (size < sizeof(Dirent)) return result.Corrupt(0, "block too small");
  const size_t names = result.At(0).name_offset;
  if (names < sizeof(Dirent) || names >= size || names % sizeof(Dirent) != 0) {
    return result.Corrupt(0, fmt::format("names at {} in a block of {} bytes", names, size));
  }
  result.entries = names / sizeof(Dirent);
  return result;
}

absl::Status Reader::ReadDirectory(const InodeInfo& directory, uint64_t position,
                                   const std::function<bool(const Entry&)>& visit) const {
  while (position < directory.size) {
    const uint64_t block_number = position / block_size_;
    ASSIGN_OR_RETURN(const DirectoryBlock block, ReadDirectoryBlock(directory, block_number));
    const uint64_t next_block = (block_number + 1) * block_size_;
    const uint64_t first = AlignUp(position % block_size_, sizeof(Dirent)) / sizeof(Dirent);
    for (size_t i = first; i < block.entries; ++i) {
      const Dirent dirent = block.At(i);
      ASSIGN_OR_RETURN(const std::string_view name, block.NameAt(i));
      const Entry entry = {
          .name = name,
          .nid = dirent.nid(),
          .type = DirentType(dirent.type),
          .position = block.start + i * sizeof(Dirent),
          .next = i + 1 < block.entries ? block.start + (i + 1) * sizeof(Dirent) : next_block,
      };
      if (!visit(entry)) return absl::OkStatus();
    }
    position = next_block;
  }
  return absl::OkStatus();
}

absl::StatusOr<Nid> Reader::Lookup(const InodeInfo& directory, std::string_view name) const {
  // First the last block that begins with a name not above the wanted one, then the name in it.
  uint64_t low = 0;
  uint64_t high = directory.size / block_size_ + (directory.size % block_size_ != 0);
  std::optional<DirectoryBlock> block;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    ASSIGN_OR_RETURN(const DirectoryBlock candidate, ReadDirectoryBlock(directory, middle));
    ASSIGN_OR_RETURN(const std::string_view first_name, candidate.NameAt(0));
    if (first_name <= name) {
      block = candidate;
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  size_t begin = 0;
  size_t end = block.has_value() ? block->entries : 0;
  while (begin < end) {
    const size_t middle = begin + (end - begin) / 2;
    ASSIGN_OR_RETURN(const std::string_view middle_name, block->NameAt(middle));
    if (middle_name == name) return block->At(middle).nid();
    if (middle_name < name) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return absl::NotFoundError(fmt::format("\"{}\" is not in directory {}", name, directory.nid));
}

}  // namespace lamina::erofs
