// SPDX-License-Identifier: Apache-2.0
//
// The archive that `docker save` writes: manifest.json lists images, each with the names of its
// configuration and layers in the archive (moby, image/spec/v1.2.md). Docker before version 25
// wrote "<id>/layer.tar", with links where layers are equal; later ones write "blobs/sha256/<hex>".
#ifndef LAMINA_FS_IMAGE_DOCKER_ARCHIVE_H_
#define LAMINA_FS_IMAGE_DOCKER_ARCHIVE_H_

#include <string>
#include <string_view>
#include <vector>

#include "fs/image/source.h"

namespace lamina::fs {

// One image in manifest.json.
struct DockerImage {
  std::string config;               // member names
  std::vector<std::string> layers;  // lowest first
  std::vector<std::string> tags;    // "NAME:TAG"
};
absl::StatusOr<std::vector<DockerImage>> ParseDockerManifest(std::string_view json);

// `reference` is the name of an image ("debian:12"; a missing tag is "latest"), or "@N" for the Nth
// from 0, or empty if there is only one.
absl::StatusOr<SourceImage> OpenDockerArchive(const std::string& file, std::string_view reference);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_DOCKER_ARCHIVE_H_
