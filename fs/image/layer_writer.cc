// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layer_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>

#include "erofs/builder.h"
#include "fs/image/scratch_file.h"

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

// The frames that a profile names in the blob with this content, in its order.
std::vector<uint32_t> ProfiledFrames(const Profile& profile, const Digest& content) {
  std::vector<uint32_t> frames;
  for (const chunkstore::Touch& touch : profile.touches) {
    if (profile.blobs[touch.blob].content == content) frames.push_back(touch.frame);
  }
  return frames;
}

// The extents of a file after its blocks have moved.
std::vector<erofs::Extent> MoveExtents(const std::vector<erofs::Extent>& extents,
                                       const std::vector<chunkstore::MovedBlocks>& moves) {
  std::vector<erofs::Extent> moved;
  for (erofs::Extent rest : extents) {
    while (rest.length > 0) {
      const auto move = std::prev(
          std::ranges::upper_bound(moves, rest.block, {}, &chunkstore::MovedBlocks::from));
      const uint32_t skipped = rest.block - move->from;
      erofs::Extent part = rest;
      part.block = move->to + skipped;
      part.length =
          std::min(rest.length, uint64_t{move->blocks - skipped} * chunkstore::kBlockSize);
      rest.offset += part.length;
      rest.length -= part.length;
      rest.block += static_cast<uint32_t>(part.length / chunkstore::kBlockSize);
      const bool joins =
          !moved.empty() && moved.back().offset + moved.back().length == part.offset &&
          moved.back().block + moved.back().length / chunkstore::kBlockSize == part.block;
      if (joins) {
        moved.back().length += part.length;
      } else {
        moved.push_back(part);
      }
    }
  }
  return moved;
}

// Moves what was written to the file `scratch` into `output`, with the frames that the profile names
// first.
absl::Status FollowProfile(const Profile& profile, const UniqueFd& scratch,
                           std::unique_ptr<chunkstore::BlobOutput> output,
                           chunkstore::BlobWriter& blob, erofs::Tree& tree) {
  const std::vector<uint32_t> first = ProfiledFrames(profile, blob.content_digest());
  ASSIGN_OR_RETURN(const std::vector<chunkstore::MovedBlocks> moves,
                   blob.Rearrange(scratch, std::move(output), first));
  for (erofs::InodeIndex i = 0; i < tree.inode_limit(); ++i) {
    erofs::Inode& inode = tree.inode(i);
    inode.extents = MoveExtents(inode.extents, moves);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<WrittenLayer> WriteLayer(
    ImageWriter& output, const chunkstore::BlobWriterOptions& options,
    const std::optional<Digest>& identity,
    const std::function<absl::StatusOr<erofs::Tree>(erofs::ContentSink&)>& import,
    const Profile* profile) {
  ASSIGN_OR_RETURN(std::unique_ptr<chunkstore::BlobOutput> object, output.NewBlob());
  UniqueFd scratch;
  std::unique_ptr<chunkstore::BlobWriter> blob;
  if (profile == nullptr) {
    ASSIGN_OR_RETURN(blob, chunkstore::BlobWriter::Create(std::move(object), options));
  } else {
    ASSIGN_OR_RETURN(scratch, OpenScratch());
    UniqueFd writing(::fcntl(scratch.get(), F_DUPFD_CLOEXEC, 0));
    if (!writing.valid()) return ErrnoStatus(errno, "duplicate a descriptor");
    ASSIGN_OR_RETURN(blob, chunkstore::BlobWriter::Create(std::move(writing), options));
  }
  BlobSink sink(*blob);
  ASSIGN_OR_RETURN(erofs::Tree tree, import(sink));
  WrittenLayer layer;
  if (profile != nullptr) {
    RETURN_IF_ERROR(FollowProfile(*profile, scratch, std::move(object), *blob, tree));
  }
  const Digest content = blob->content_digest();
  ASSIGN_OR_RETURN(
      const std::string metadata,
      erofs::BuildImage(tree, {.devices = {{.tag = content.Hex(), .blocks = blob->blocks()}},
                               .uuid = UuidFrom(identity.value_or(content))}));
  layer.inodes = CountInodes(tree);
  ASSIGN_OR_RETURN(layer.blob, blob->Finish(AsBytes(metadata)));
  return layer;
}

}  // namespace lamina::fs
