// SPDX-License-Identifier: Apache-2.0
//
// An image to be converted, wherever it comes from: an OCI layout, the archive of one, or what
// `docker save` writes. Opening reads and checks the documents; layers are read in place later.
#ifndef LAMINA_FS_IMAGE_SOURCE_H_
#define LAMINA_FS_IMAGE_SOURCE_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fs/image/byte_range.h"
#include "fs/image/image_store.h"
#include "fs/image/oci.h"
#include "fs/image/reference.h"

namespace lamina::fs {

struct SourceLayer {
  ByteRange content;             // a tar archive, compressed or not
  std::optional<Digest> digest;  // of `content`, not verified yet; docker-archive does not tell
  Digest diff_id;                // of the uncompressed archive, not verified yet
};

struct SourceImage {
  oci::Descriptor manifest;  // without digest for docker-archive, which has none
  std::string config_json;   // byte for byte; its digest is verified if the source tells one
  oci::ImageConfig config;
  std::vector<SourceLayer> layers;                 // lowest first
  std::map<std::string, std::string> annotations;  // of the manifest
};

// The image whose manifest that is.
absl::StatusOr<SourceImage> ReadSource(const ImageStore& store, const oci::Descriptor& manifest);

// Any transport but dir:. With `platform`, the image must be for it; without, the host's is chosen
// where there is a choice. Fails with kFailedPrecondition if the image is converted already, and
// with kUnimplemented, naming the layer, if a layer is encrypted, kept elsewhere or not a file
// system.
absl::StatusOr<SourceImage> OpenSource(const ImageReference& reference,
                                       const std::optional<oci::Platform>& platform,
                                       const RegistryAccess& access = {});

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_SOURCE_H_
