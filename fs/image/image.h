// SPDX-License-Identifier: Apache-2.0
//
// A converted image, opened: its configuration, its layers' descriptors and the origin of their
// blobs. Opening reads manifest and configuration only.
#ifndef LAMINA_FS_IMAGE_IMAGE_H_
#define LAMINA_FS_IMAGE_IMAGE_H_

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/blob_tables.h"
#include "chunkstore/origin.h"
#include "fs/image/image_store.h"
#include "fs/image/oci.h"

namespace lamina::fs {

struct Image {
  std::string reference;  // as the user gave it
  Digest manifest_digest;
  std::string manifest_json;
  oci::Manifest manifest;
  std::string config_json;
  oci::ImageConfig config;
  std::vector<chunkstore::LayerDescriptor> layers;  // lowest first
  std::shared_ptr<chunkstore::Origin> origin;
  std::shared_ptr<const ImageStore> store;  // where it was found
};

// `reference` is "oci:DIR[:TAG]" or "docker://HOST/REPOSITORY[:TAG][@DIGEST]"; where that is for
// several platforms, `platform` decides. An image that is not converted stands for the converted one
// that is attached to it (by "subject"), if there is one. kNotFound if there is no such image;
// kFailedPrecondition, with the command to run, if it is there but neither converted nor attached.
absl::StatusOr<Image> OpenImage(std::string_view reference, const oci::Platform& platform,
                                const RegistryAccess& access = {});

// Images that are put on top of each other, lowest first. A layer that an image has in common with
// those below is left out of it, of its manifest and configuration as well: on top of what it was made
// from an image only adds what is its own. Credentials as CheckCredentials wants them.
absl::StatusOr<std::vector<Image>> OpenImages(std::span<const std::string> references,
                                              const oci::Platform& platform,
                                              const RegistryAccess& access = {});

// The same place, and in it the image with this manifest, whatever the reference leads to by now.
absl::StatusOr<std::string> PinReference(std::string_view reference, const Digest& manifest);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_IMAGE_H_
