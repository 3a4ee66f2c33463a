// SPDX-License-Identifier: Apache-2.0
//
// Looks at a converted image as a whole: checks all of it, or describes it.
#ifndef LAMINA_FS_IMAGE_VERIFY_H_
#define LAMINA_FS_IMAGE_VERIFY_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "fs/image/image.h"

namespace lamina::fs {

// Checks every digest below those that opening the image has checked: section tables, sections, frames with
// their checksums, chunks, the whole object, and that the metadata is sound and refers to content
// that exists. Returns the first thing that is wrong, by name. `progress` (may be null) gets bytes
// checked and bytes in all.
absl::Status VerifyImage(const Image& image,
                         const std::function<void(uint64_t, uint64_t)>& progress);

struct LayerReport {
  chunkstore::LayerDescriptor descriptor;
  uint64_t files = 0;  // inodes
  uint64_t frames = 0;
  uint64_t chunks = 0;
  uint64_t chunks_in_lower_layers = 0;  // also found in a layer below
  uint64_t content_bytes = 0;           // of the chunks, uncompressed
  uint64_t compressed_bytes = 0;        // of the frames
  uint64_t metadata_bytes = 0;          // uncompressed
};

// One report a layer, lowest first. Reads tables and metadata, not the frames.
absl::StatusOr<std::vector<LayerReport>> InspectImage(const Image& image);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_VERIFY_H_
