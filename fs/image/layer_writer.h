// SPDX-License-Identifier: Apache-2.0
//
// Makes one layer blob: joins the importers of erofs/ with the blob writer of chunkstore/.
#ifndef LAMINA_FS_IMAGE_LAYER_WRITER_H_
#define LAMINA_FS_IMAGE_LAYER_WRITER_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "chunkstore/blob_writer.h"
#include "erofs/import.h"
#include "fs/image/image_writer.h"
#include "fs/image/profile.h"

namespace lamina::fs {

struct WrittenLayer {
  chunkstore::BlobInfo blob;
  uint64_t inodes = 0;
};

// Adds a layer blob to `output`. `import` reads the files: their content goes to the sink it is
// given, and becomes device slot 1 of the metadata. `identity`, a digest of what is imported, gives
// the metadata its UUID; where there is none, the digest of the content does. If `profile` (which may
// be null) was recorded on this layer as it is laid out without one, the frames that it names come
// first.
absl::StatusOr<WrittenLayer> WriteLayer(
    ImageWriter& output, const chunkstore::BlobWriterOptions& options,
    const std::optional<Digest>& identity,
    const std::function<absl::StatusOr<erofs::Tree>(erofs::ContentSink&)>& import,
    const Profile* profile = nullptr);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_LAYER_WRITER_H_
