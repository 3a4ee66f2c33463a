// SPDX-License-Identifier: Apache-2.0
//
// Writes a Tree as EROFS metadata: superblock, inodes, directories, xattrs and a device table, with
// file content on extra devices. FORMAT.md describes the subset of EROFS that is used. The result
// is a pure function of its arguments.
#ifndef LAMINA_EROFS_BUILDER_H_
#define LAMINA_EROFS_BUILDER_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "erofs/tree.h"

namespace lamina::erofs {

// A data device: slot i of the table is devices[i - 1].
struct Device {
  std::string tag;      // at most 64 bytes: names the content, see FORMAT.md
  uint32_t blocks = 0;  // its length in 4 KiB blocks
};

struct BuildOptions {
  std::vector<Device> devices;
  std::array<uint8_t, 16> uuid{};
};

// The metadata, a whole number of blocks. Fails with kInvalidArgument, naming the path, on what
// EROFS cannot carry: an xattr outside its name spaces or over 64 KiB, an extent outside its
// device.
absl::StatusOr<std::string> BuildImage(const Tree& tree, const BuildOptions& options);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_BUILDER_H_
