// SPDX-License-Identifier: Apache-2.0
//
// How images are named on the command line: "oci:DIR[:TAG]" and the like, read as skopeo and podman
// read them (containers-transports(5)): the first colon after the transport ends the path, so a
// path has no colon and a tag may ("oci:/srv/images:debian:12" is the tag "debian:12").
#ifndef LAMINA_FS_IMAGE_REFERENCE_H_
#define LAMINA_FS_IMAGE_REFERENCE_H_

#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina::fs {

enum class Transport { kOciLayout, kOciArchive, kDockerArchive, kDirectory };

struct ImageReference {
  Transport transport = Transport::kOciLayout;
  std::string path;
  std::string name;  // tag, or what docker-archive takes; empty if none was given

  // "oci:DIR[:TAG]", "oci-archive:FILE[:TAG]", "docker-archive:FILE[:REF]" or "dir:PATH", in which
  // the path is all the rest, colons too. A TAG follows the grammar of image-spec (annotations.md,
  // org.opencontainers.image.ref.name).
  static absl::StatusOr<ImageReference> Parse(std::string_view text);
  // The same, which must be an OCI layout.
  static absl::StatusOr<ImageReference> ParseLayout(std::string_view text);
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_REFERENCE_H_
