// SPDX-License-Identifier: Apache-2.0
#include "erofs/directory_writer.h"

#include <algorithm>
#include <cstring>

namespace lamina::erofs {
namespace {

// How many of the entries fit in one block, and the bytes they take.
struct BlockFill {
  size_t entries = 0;
  uint32_t bytes = 0;
};

BlockFill FillBlock(std::span<const DirectoryEntry> entries) {
  BlockFill fill;
  for (const DirectoryEntry& entry : entries) {
    const uint32_t bytes = static_cast<uint32_t>(sizeof(Dirent) + entry.name.size());
    if (fill.bytes + bytes > kBlockSize) break;
    fill.bytes += bytes;
    ++fill.entries;
  }
  return fill;
}

void WriteBlock(const Tree& tree, std::span<const DirectoryEntry> entries,
                std::span<const uint64_t> nids, std::byte* to) {
  size_t name_offset = entries.size() * sizeof(Dirent);
  for (const DirectoryEntry& entry : entries) {
    const uint64_t nid = nids[entry.inode];
    const Dirent dirent = {
        .nid_low = static_cast<uint32_t>(nid),
        .nid_high = static_cast<uint32_t>(nid >> 32),
        .name_offset = static_cast<uint16_t>(name_offset),
        .type = static_cast<uint8_t>(FileTypeOfMode(tree.inode(entry.inode).mode)),
    };
    std::memcpy(to + (&entry - entries.data()) * sizeof(Dirent), &dirent, sizeof(dirent));
    std::memcpy(to + name_offset, entry.name.data(), entry.name.size());
    name_offset += entry.name.size();
  }
}

}  // namespace

std::vector<DirectoryEntry> EntriesWithDots(const Tree& tree, InodeIndex directory) {
  std::vector<DirectoryEntry> entries = tree.Entries(directory);
  const DirectoryEntry dots[] = {{".", directory}, {"..", tree.Parent(directory)}};
  for (const DirectoryEntry& dot : dots) {
    const auto place = std::lower_bound(
        entries.begin(), entries.end(), dot.name,
        [](const DirectoryEntry& entry, std::string_view name) { return entry.name < name; });
    entries.insert(place, dot);
  }
  return entries;
}

uint64_t DirectorySize(std::span<const DirectoryEntry> entries) {
  uint64_t size = 0;
  while (true) {
    const BlockFill fill = FillBlock(entries);
    entries = entries.subspan(fill.entries);
    if (entries.empty()) return size + fill.bytes;
    size += kBlockSize;
  }
}

void WriteDirectory(const Tree& tree, std::span<const DirectoryEntry> entries,
                    std::span<const uint64_t> nids, std::byte* blocks, std::byte* tail) {
  while (!entries.empty()) {
    const BlockFill fill = FillBlock(entries);
    const bool last = fill.entries == entries.size();
    WriteBlock(tree, entries.first(fill.entries), nids, last && tail != nullptr ? tail : blocks);
    entries = entries.subspan(fill.entries);
    blocks += kBlockSize;
  }
}

}  // namespace lamina::erofs
