// SPDX-License-Identifier: Apache-2.0
//
// How images are named on the command line: "oci:DIR[:TAG]" and the like, read as skopeo and podman
// read them (containers-transports(5)): the first colon after the transport ends the path, so a
// path has no colon and a tag may ("oci:/srv/images:debian:12" is the tag "debian:12"). Images in a
// registry are "docker://" and what registry/reference.h says.
#ifndef LAMINA_FS_IMAGE_REFERENCE_H_
#define LAMINA_FS_IMAGE_REFERENCE_H_

#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina::fs {

enum class ImageTransport { kOciLayout, kOciArchive, kDockerArchive, kDirectory, kRegistry };

struct ImageReference {
  ImageTransport transport = ImageTransport::kOciLayout;
  std::string path;  // of a registry's image: all behind "docker://"
  std::string name;  // tag, or what docker-archive takes; empty if none was given

  // "oci:DIR[:TAG]", "oci-archive:FILE[:TAG]", "docker-archive:FILE[:REF]", "dir:PATH", in which the
  // path is all the rest, colons too, or "docker://HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]". A TAG follows the grammar of image-spec (annotations.md,
  // org.opencontainers.image.ref.name).
  static absl::StatusOr<ImageReference> Parse(std::string_view text);
  // The same, which must be an OCI layout or in a registry: where converted images can be.
  static absl::StatusOr<ImageReference> ParseConverted(std::string_view text);
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_REFERENCE_H_
