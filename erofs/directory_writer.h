// SPDX-License-Identifier: Apache-2.0
//
// The content of directories: blocks of entries followed by their names.
#ifndef LAMINA_EROFS_DIRECTORY_WRITER_H_
#define LAMINA_EROFS_DIRECTORY_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "erofs/format.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// A directory's entries with "." and ".." where they belong in byte order.
std::vector<DirectoryEntry> EntriesWithDots(const Tree& tree, InodeIndex directory);

// Bytes of a directory with these entries. Every block but the last is full.
uint64_t DirectorySize(std::span<const DirectoryEntry> entries);

// Writes a directory. Block i goes to blocks + i * kBlockSize, but the last one goes to `tail`
// unless that is null. The memory must be zero. `nids` is indexed by InodeIndex.
void WriteDirectory(const Tree& tree, std::span<const DirectoryEntry> entries,
                    std::span<const uint64_t> nids, std::byte* blocks, std::byte* tail);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_DIRECTORY_WRITER_H_
