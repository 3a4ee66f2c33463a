// SPDX-License-Identifier: Apache-2.0
#include "fs/image/image_writer.h"

#include "chunkstore/registry/reference.h"
#include "fs/image/layout_writer.h"
#include "fs/image/registry_writer.h"

namespace lamina::fs {

absl::StatusOr<std::unique_ptr<ImageWriter>> OpenWriter(const ImageReference& destination,
                                                        const RegistryAccess& access,
                                                        const ImageReference* source) {
  if (destination.transport == ImageTransport::kOciLayout) {
    return LayoutWriter::Create(destination.path, destination.name);
  }
  if (destination.transport != ImageTransport::kRegistry) {
    return absl::InvalidArgumentError("an image is written to an OCI layout or to a registry");
  }
  std::string from_repository;
  if (source != nullptr && source->transport == ImageTransport::kRegistry) {
    ASSIGN_OR_RETURN(const auto from, registry::Reference::Parse(source->path));
    ASSIGN_OR_RETURN(const auto to, registry::Reference::Parse(destination.path));
    if (from.host == to.host && from.repository != to.repository) from_repository = from.repository;
  }
  return OpenRegistryWriter(destination, access, std::move(from_repository));
}

}  // namespace lamina::fs
