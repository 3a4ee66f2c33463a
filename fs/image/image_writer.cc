// SPDX-License-Identifier: Apache-2.0
#include "fs/image/image_writer.h"

#include <algorithm>
#include <vector>

#include "chunkstore/registry/reference.h"
#include "fs/image/layout_writer.h"
#include "fs/image/registry_writer.h"

namespace lamina::fs {
namespace {

constexpr size_t kCopySize = 1 << 20;

}  // namespace

absl::Status CopyBlob(const ImageStore& store, const oci::Descriptor& blob,
                      chunkstore::BlobOutput& output) {
  ASSIGN_OR_RETURN(const ByteRange content, store.OpenBlob(blob));
  std::vector<std::byte> buffer(std::min<uint64_t>(kCopySize, content.size));
  Hasher hasher;
  for (uint64_t position = 0; position < content.size;) {
    const auto piece =
        std::span(buffer).first(std::min<uint64_t>(buffer.size(), content.size - position));
    RETURN_IF_ERROR(content.Read(position, piece));
    hasher.Update(piece);
    RETURN_IF_ERROR(output.Append(piece));
    position += piece.size();
  }
  const Digest actual = hasher.Finish();
  if (actual != blob.digest) {
    return absl::DataLossError(fmt::format("{}: blob {} has the digest {}", store.name(),
                                           blob.digest.ToString(), actual.ToString()));
  }
  return output.Finish(blob.digest);
}

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
