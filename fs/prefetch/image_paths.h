// SPDX-License-Identifier: Apache-2.0
//
// Finds files of an image by their paths, as a process inside would.
#ifndef LAMINA_FS_PREFETCH_IMAGE_PATHS_H_
#define LAMINA_FS_PREFETCH_IMAGE_PATHS_H_

#include <string>
#include <string_view>

#include "erofs/reader.h"

namespace lamina::fs {

struct FoundFile {
  erofs::InodeInfo inode;
  std::string path;  // absolute, without symbolic links
};

// Follows symbolic links, never above the image's root. `path` is absolute, or relative to the root.
// kNotFound if there is no such file, kFailedPrecondition for too many links (40, as in Linux), a path
// or link of more than 4095 bytes, or more than 4096 components with those of the links.
absl::StatusOr<FoundFile> FindFile(const erofs::Reader& image, std::string_view path);

}  // namespace lamina::fs

#endif  // LAMINA_FS_PREFETCH_IMAGE_PATHS_H_
