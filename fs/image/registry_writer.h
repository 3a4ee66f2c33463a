// SPDX-License-Identifier: Apache-2.0
//
// Writes an image to a repository in a registry. Layers go up while they are made.
#ifndef LAMINA_FS_IMAGE_REGISTRY_WRITER_H_
#define LAMINA_FS_IMAGE_REGISTRY_WRITER_H_

#include <memory>
#include <string>

#include "fs/image/image_writer.h"

namespace lamina::fs {

// `destination` is a docker: reference. Blobs that `from_repository` (may be empty) of the same
// registry has are taken from there.
absl::StatusOr<std::unique_ptr<ImageWriter>> OpenRegistryWriter(const ImageReference& destination,
                                                                const RegistryAccess& access,
                                                                std::string from_repository);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_REGISTRY_WRITER_H_
