// SPDX-License-Identifier: Apache-2.0
#include "fs/image/profile_artifact.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "chunkstore/blob_output.h"
#include "fs/image/image_document.h"
#include "fs/image/image_writer.h"
#include "fs/image/layer_reader.h"
#include "fs/image/reference.h"

namespace lamina::fs {
namespace {

using chunkstore::FrameRecord;
using chunkstore::OriginBlob;
using chunkstore::Touch;
using oci::Descriptor;

// Compressed bytes of a pack that are read at a time.
constexpr uint64_t kBatch = 4 << 20;

absl::StatusOr<AttachedProfile> ReadAttached(const Image& image, const Descriptor& entry) {
  const ImageStore& store = *image.store;
  AttachedProfile attached{.manifest_digest = entry.digest};
  ASSIGN_OR_RETURN(const std::string manifest_text, store.ReadDocument(entry, "artifact manifest"));
  ASSIGN_OR_RETURN(const oci::Manifest manifest, oci::Manifest::Parse(manifest_text));
  // Whoever lists what is attached may lie.
  if (!manifest.subject || manifest.subject->digest != image.manifest_digest) {
    return absl::DataLossError("it is not attached to this image");
  }
  if (const auto created = manifest.annotations.find(std::string(oci::kCreatedKey));
      created != manifest.annotations.end()) {
    attached.created = created->second;
  }
  for (const Descriptor& layer : manifest.layers) {
    if (layer.media_type == kPackType) attached.pack = layer;
  }
  if (manifest.layers.empty() || manifest.layers[0].media_type != kProfileType) {
    return absl::InvalidArgumentError(
        fmt::format("its first layer is not of type {}", kProfileType));
  }
  attached.profile_digest = manifest.layers[0].digest;
  ASSIGN_OR_RETURN(const std::string text, store.ReadDocument(manifest.layers[0], "profile"));
  ASSIGN_OR_RETURN(attached.profile, Profile::Parse(text));
  return attached;
}

// The layers that a profile names, with their tables.
struct ProfiledLayer {
  std::unique_ptr<OriginBlob> origin;
  std::unique_ptr<const LayerTables> tables;
};

absl::StatusOr<std::vector<ProfiledLayer>> ReadLayers(const Image& image, const Profile& profile) {
  std::map<Digest, chunkstore::LayerDescriptor> known;
  for (const chunkstore::LayerDescriptor& layer : image.layers) known[layer.digest] = layer;
  std::vector<ProfiledLayer> layers;
  for (const Profile::Blob& blob : profile.blobs) {
    const auto descriptor = known.find(blob.digest);
    if (descriptor == known.end()) {
      return absl::InvalidArgumentError(fmt::format(
          "the profile names blob {}, which is no layer of the image", blob.digest.ToString()));
    }
    ProfiledLayer layer{.origin = std::make_unique<OriginBlob>(descriptor->second, image.origin)};
    ASSIGN_OR_RETURN(layer.tables, ReadLayerTables(*layer.origin, descriptor->second), "layer {}",
                     blob.digest.ToString());
    layers.push_back(std::move(layer));
  }
  for (const Touch& touch : profile.touches) {
    const uint32_t frames = layers[touch.blob].tables->frames.size();
    if (touch.frame >= frames) {
      return absl::InvalidArgumentError(
          fmt::format("the profile names frame {} of blob {}, which has {}", touch.frame,
                      profile.blobs[touch.blob].digest.ToString(), frames));
    }
  }
  return layers;
}

// Appends the frames that `touches` name to `output`; returns how many bytes that are.
absl::StatusOr<uint64_t> CopyFrames(const std::vector<ProfiledLayer>& layers,
                                    std::span<const Touch> touches, chunkstore::BlobOutput& output,
                                    Hasher& hasher) {
  const auto record = [&](const Touch& touch) -> const FrameRecord& {
    return layers[touch.blob].tables->frames[touch.frame];
  };
  uint64_t size = 0;
  for (const Touch& touch : touches) size += record(touch).length;
  std::vector<std::byte> buffer(size);
  std::map<uint32_t, std::vector<chunkstore::RangeRead>> reads;  // by blob
  uint64_t position = 0;
  for (const Touch& touch : touches) {
    const uint64_t length = record(touch).length;
    reads[touch.blob].push_back(
        {record(touch).offset, std::span(buffer).subspan(position, length)});
    position += length;
  }
  for (const auto& [blob, ranges] : reads) RETURN_IF_ERROR(layers[blob].origin->Read(ranges));
  position = 0;
  for (const Touch& touch : touches) {
    const Digest digest = Digest::Of(std::span(buffer).subspan(position, record(touch).length));
    if (std::memcmp(digest.bytes.data(), record(touch).digest, digest.bytes.size()) != 0) {
      return absl::DataLossError(fmt::format("frame {}: digest mismatch", touch.frame));
    }
    position += record(touch).length;
  }
  hasher.Update(buffer);
  RETURN_IF_ERROR(output.Append(buffer));
  return size;
}

absl::StatusOr<Descriptor> WritePack(ImageWriter& output, const Profile& profile,
                                     const std::vector<ProfiledLayer>& layers) {
  ASSIGN_OR_RETURN(const std::unique_ptr<chunkstore::BlobOutput> object, output.NewBlob());
  Hasher hasher;
  uint64_t size = 0;
  for (std::span<const Touch> rest(profile.touches); !rest.empty();) {
    size_t count = 0;
    uint64_t bytes = 0;
    while (count < rest.size() && bytes < kBatch) {
      const Touch& touch = rest[count++];
      bytes += layers[touch.blob].tables->frames[touch.frame].length;
    }
    ASSIGN_OR_RETURN(const uint64_t copied, CopyFrames(layers, rest.first(count), *object, hasher));
    size += copied;
    rest = rest.subspan(count);
  }
  Descriptor pack{.media_type = std::string(kPackType), .digest = hasher.Finish(), .size = size};
  RETURN_IF_ERROR(object->Finish(pack.digest));
  return pack;
}

absl::StatusOr<Descriptor> AddBlob(ImageWriter& output, std::string_view type,
                                   std::string_view content) {
  RETURN_IF_ERROR(output.AddBlob(content));
  return Descriptor{.media_type = std::string(type),
                    .digest = Digest::Of(AsBytes(content)),
                    .size = content.size()};
}

absl::StatusOr<AttachedProfile> Attach(const Image& image, const Profile& profile, bool with_pack,
                                       const RegistryAccess& access) {
  ASSIGN_OR_RETURN(const ImageReference reference, ImageReference::ParseConverted(image.reference));
  ASSIGN_OR_RETURN(const std::vector<ProfiledLayer> layers, ReadLayers(image, profile));
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageWriter> output,
                   OpenWriter(reference, access, /*source=*/nullptr));
  AttachedProfile attached{.created = TimestampNow(), .profile = profile};
  oci::Manifest manifest{.media_type = std::string(oci::kManifestType),
                         .annotations = {{std::string(oci::kCreatedKey), attached.created}},
                         .artifact_type = std::string(kProfileType),
                         .subject = Descriptor{.media_type = image.manifest.media_type,
                                               .digest = image.manifest_digest,
                                               .size = image.manifest_json.size()}};
  ASSIGN_OR_RETURN(manifest.config, AddBlob(*output, oci::kEmptyType, oci::kEmptyContent));
  ASSIGN_OR_RETURN(const Descriptor stored, AddBlob(*output, kProfileType, profile.ToJson()));
  attached.profile_digest = stored.digest;
  manifest.layers.push_back(stored);
  if (with_pack) {
    ASSIGN_OR_RETURN(attached.pack, WritePack(*output, profile, layers), "pack");
    manifest.layers.push_back(*attached.pack);
  }
  const std::string text = manifest.ToJson();
  const Descriptor entry{.media_type = manifest.media_type,
                         .digest = Digest::Of(AsBytes(text)),
                         .size = text.size(),
                         .annotations = manifest.annotations,
                         .artifact_type = manifest.artifact_type};
  attached.manifest_digest = entry.digest;
  RETURN_IF_ERROR(output->Attach(entry, image.manifest_digest, text));
  return attached;
}

}  // namespace

absl::StatusOr<std::vector<absl::StatusOr<AttachedProfile>>> ListProfiles(const Image& image) {
  ASSIGN_OR_RETURN(const std::vector<Descriptor> entries,
                   image.store->FindReferrers(image.manifest_digest, kProfileType));
  std::vector<absl::StatusOr<AttachedProfile>> profiles;
  for (const Descriptor& entry : entries) {
    absl::StatusOr<AttachedProfile> profile = ReadAttached(image, entry);
    if (!profile.ok()) profile = Annotate(profile.status(), "profile " + entry.digest.ToString());
    profiles.push_back(std::move(profile));
  }
  return profiles;
}

absl::StatusOr<AttachedProfile> FindProfile(const Image& image) {
  ASSIGN_OR_RETURN(const std::vector<Descriptor> entries,
                   image.store->FindReferrers(image.manifest_digest, kProfileType));
  if (entries.empty()) {
    return absl::NotFoundError(
        fmt::format("no profile is attached to {}", image.manifest_digest.ToString()));
  }
  ASSIGN_OR_RETURN(AttachedProfile profile, ReadAttached(image, entries.back()), "profile {}",
                   entries.back().digest.ToString());
  return profile;
}

absl::StatusOr<AttachedProfile> AttachProfile(const Image& image, const Profile& profile,
                                              bool with_pack, const RegistryAccess& access) {
  absl::StatusOr<AttachedProfile> attached = Attach(image, profile, with_pack, access);
  if (!attached.ok()) {
    return Annotate(attached.status(), "attach a profile to " + image.reference);
  }
  return attached;
}

}  // namespace lamina::fs
