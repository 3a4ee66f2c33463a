// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layer_writer.h"

#include <algorithm>
#include <array>

#include "erofs/builder.h"

namespace lamina::fs {
namespace {

// Hands file content from the importers of erofs/ to a blob, and its places back.
class BlobSink : public erofs::ContentSink {
 public:
  explicit BlobSink(chunkstore::BlobWriter& blob) : blob_(blob) {}

  absl::Status BeginFile(uint64_t size) override { return blob_.BeginFile(size); }
  absl::Status Append(std::span<const std::byte> data) override { return blob_.Append(data); }
  absl::Status AppendHole(uint64_t length) override { return blob_.AppendHole(length); }

  absl::StatusOr<std::vector<erofs::Extent>> EndFile() override {
    ASSIGN_OR_RETURN(const std::vector<chunkstore::Placement> placements, blob_.EndFile());
    std::vector<erofs::Extent> extents;
    extents.reserve(placements.size());
    for (const chunkstore::Placement& placement : placements) {
      extents.push_back({placement.offset, placement.length, kBlobSlot, placement.block});
    }
    return extents;
  }

 private:
  static constexpr uint16_t kBlobSlot = 1;  // in the layer's device table
  chunkstore::BlobWriter& blob_;
};

// A UUID (RFC 9562, version 8: made by a rule of our own) from a digest, so that it says nothing
// but what the content says. overlayfs wants layers to have different ones.
std::array<uint8_t, 16> UuidFrom(const Digest& digest) {
  std::array<uint8_t, 16> uuid{};
  std::copy_n(digest.bytes.begin(), uuid.size(), uuid.begin());
  uuid[6] = (uuid[6] & 0x0f) | 0x80;
  uuid[8] = (uuid[8] & 0x3f) | 0x80;
  return uuid;
}

uint64_t CountInodes(const erofs::Tree& tree) {
  uint64_t count = 0;
  for (erofs::InodeIndex i = 0; i < tree.inode_limit(); ++i) count += tree.link_count(i) != 0;
  return count;
}

}  // namespace

absl::StatusOr<WrittenLayer> WriteLayer(
    ImageWriter& output, const chunkstore::BlobWriterOptions& options,
    const std::optional<Digest>& identity,
    const std::function<absl::StatusOr<erofs::Tree>(erofs::ContentSink&)>& import) {
  ASSIGN_OR_RETURN(std::unique_ptr<chunkstore::BlobOutput> object, output.NewBlob());
  ASSIGN_OR_RETURN(const std::unique_ptr<chunkstore::BlobWriter> blob,
                   chunkstore::BlobWriter::Create(std::move(object), options));
  BlobSink sink(*blob);
  ASSIGN_OR_RETURN(const erofs::Tree tree, import(sink));
  const Digest content = blob->content_digest();
  ASSIGN_OR_RETURN(
      const std::string metadata,
      erofs::BuildImage(tree, {.devices = {{.tag = content.Hex(), .blocks = blob->blocks()}},
                               .uuid = UuidFrom(identity.value_or(content))}));
  WrittenLayer layer{.inodes = CountInodes(tree)};
  ASSIGN_OR_RETURN(layer.blob, blob->Finish(AsBytes(metadata)));
  return layer;
}

}  // namespace lamina::fs
