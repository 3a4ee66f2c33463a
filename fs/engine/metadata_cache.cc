// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/metadata_cache.h"

#include <fcntl.h>
#include <malloc.h>
#include <spdlog/spdlog.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "chunkstore/format.h"
#include "erofs/builder.h"
#include "erofs/merge.h"
#include "erofs/reader.h"
#include "fs/image/layer_reader.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;

// Part of the cache key: raise it when merging or building gives other bytes than before.
constexpr std::string_view kMergeVersion = "1";

// The file ends in this, so that damage on the local disk is noticed before the kernel sees it. It
// lies in the padding behind the EROFS image.
struct Trailer {
  char magic[8];
  uint64_t checksum;  // XXH3-64 of all bytes before the trailer
};
// Of a layer's file; an image's is padded to what a VM needs to map it.
constexpr uint64_t kLayerAlignment = 4096;
// Behind the EROFS image of a layer.
constexpr char kMarksMagic[8] = {'L', 'A', 'M', 'I', 'N', 'A', 'L', 'M'};
struct MarksRecord {
  char magic[8];
  uint8_t implied_root;
  uint8_t implied_directories;
  uint8_t opaque_root;
  uint8_t padding[5];
};
static_assert(sizeof(MarksRecord) == 16);
constexpr char kTrailerMagic[8] = {'L', 'A', 'M', 'I', 'N', 'A', 'M', 'D'};

Digest CacheKey(std::span<const chunkstore::LayerDescriptor> layers) {
  Hasher hasher;
  hasher.Update(AsBytes(kMergeVersion));
  for (const chunkstore::LayerDescriptor& layer : layers) {
    // The section table covers the metadata, the object's digest names the device.
    hasher.Update(std::as_bytes(std::span(layer.digest.bytes)));
    hasher.Update(std::as_bytes(std::span(layer.section_table_digest.bytes)));
  }
  return hasher.Finish();
}

uint64_t Checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

absl::StatusOr<MergedMetadata> OpenCached(const std::string& path) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get()));
  MergedMetadata metadata{.path = path};
  ASSIGN_OR_RETURN(metadata.mapping, Mapping::OfFile(fd.get(), size, /*writable=*/false));
  const std::span<const std::byte> bytes = std::as_const(metadata.mapping).bytes();
  Trailer trailer{};
  if (bytes.size() < sizeof(trailer)) {
    return absl::DataLossError(fmt::format("{}: only {} bytes", path, size));
  }
  const auto content = bytes.first(bytes.size() - sizeof(trailer));
  std::memcpy(&trailer, bytes.data() + content.size(), sizeof(trailer));
  if (std::memcmp(trailer.magic, kTrailerMagic, sizeof(kTrailerMagic)) != 0 ||
      trailer.checksum != Checksum(content)) {
    return absl::DataLossError(path + ": checksum mismatch");
  }
  DropResident(bytes);  // the kernel reads the file itself, only TreeFs uses the mapping
  return metadata;
}

// Appends zeros and the trailer up to `size`.
void Seal(std::string& image, uint64_t size) {
  image.resize(size - sizeof(Trailer), '\0');
  Trailer trailer{.checksum = Checksum(AsBytes(image))};
  std::memcpy(trailer.magic, kTrailerMagic, sizeof(kTrailerMagic));
  image.append(reinterpret_cast<const char*>(&trailer), sizeof(trailer));
}

absl::Status WriteSealed(const std::string& path, const std::string& image) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  if (error) return ErrnoStatus(error.value(), "create the directory of " + path);
  // Not synced: the checksum tells what a machine crash leaves of it.
  return WriteFileAtomically(path, image, 0644, Durability::kCached);
}

absl::StatusOr<erofs::Reader> ReaderOf(const Blob& blob) {
  const std::string digest = blob.descriptor().digest.ToString();
  ASSIGN_OR_RETURN(erofs::Reader reader, erofs::Reader::Open(blob.metadata()),
                   "metadata of layer {}", digest);
  RETURN_IF_ERROR(CheckDevice(reader, blob.blocks(), blob.content_digest()), "layer {}", digest);
  return reader;
}

erofs::BuildOptions OptionsFor(const std::vector<std::shared_ptr<Blob>>& blobs, const Digest& key) {
  erofs::BuildOptions options;
  for (const auto& blob : blobs) {
    options.devices.push_back({.tag = blob->descriptor().digest.Hex(), .blocks = blob->blocks()});
  }
  std::copy_n(key.bytes.begin(), options.uuid.size(), options.uuid.begin());
  return options;
}

// The content of a metadata file.
absl::StatusOr<std::string> BuildMerged(const std::vector<std::shared_ptr<Blob>>& blobs,
                                        const Digest& key) {
  std::vector<erofs::Reader> readers;
  readers.reserve(blobs.size());
  std::vector<const erofs::Reader*> layers;
  for (const auto& blob : blobs) {
    ASSIGN_OR_RETURN(erofs::Reader reader, ReaderOf(*blob));
    readers.push_back(std::move(reader));
    layers.push_back(&readers.back());
  }
  ASSIGN_OR_RETURN(const erofs::Tree tree, erofs::MergeLayers(layers), "merge layers");
  ASSIGN_OR_RETURN(std::string image, erofs::BuildImage(tree, OptionsFor(blobs, key)));
  Seal(image, chunkstore::PaddedFileSize(image.size() + sizeof(Trailer)));
  return image;
}

Digest LayerKey(const chunkstore::LayerDescriptor& layer) {
  Hasher hasher;
  hasher.Update(AsBytes("layer 2"));  // changes with what is written for one
  const Digest key = CacheKey(std::span(&layer, 1));
  hasher.Update(std::as_bytes(std::span(key.bytes)));
  return hasher.Finish();
}

absl::StatusOr<std::string> BuildLayer(const std::shared_ptr<Blob>& blob, const Digest& key) {
  ASSIGN_OR_RETURN(const erofs::Reader reader, ReaderOf(*blob));
  ASSIGN_OR_RETURN(const erofs::LayerTree layer, erofs::ReadLayer(reader), "layer {}",
                   blob->descriptor().digest.ToString());
  ASSIGN_OR_RETURN(std::string image, erofs::BuildImage(layer.tree, OptionsFor({blob}, key)));
  const uint64_t tail = sizeof(MarksRecord) + sizeof(Trailer);
  const uint64_t size =
      (image.size() + tail + kLayerAlignment - 1) / kLayerAlignment * kLayerAlignment;
  image.resize(size - tail, '\0');
  MarksRecord marks{.implied_root = layer.marks.implied_root,
                    .implied_directories = layer.marks.implied_directories,
                    .opaque_root = layer.marks.opaque_root};
  std::memcpy(marks.magic, kMarksMagic, sizeof(kMarksMagic));
  image.append(reinterpret_cast<const char*>(&marks), sizeof(marks));
  Seal(image, size);
  return image;
}

absl::StatusOr<erofs::LayerMarks> MarksIn(const MergedMetadata& metadata) {
  const std::span<const std::byte> bytes = metadata.mapping.bytes();
  MarksRecord marks{};
  constexpr size_t kTail = sizeof(MarksRecord) + sizeof(Trailer);
  if (bytes.size() >= kTail) std::memcpy(&marks, bytes.last(kTail).data(), sizeof(marks));
  if (std::memcmp(marks.magic, kMarksMagic, sizeof(kMarksMagic)) != 0) {
    return absl::DataLossError(metadata.path + ": not the metadata of a layer");
  }
  return erofs::LayerMarks{marks.implied_root != 0, marks.implied_directories != 0,
                           marks.opaque_root != 0};
}

// The metadata file with that key; what `build` gives is written first if it is not there, or damaged.
template <typename Build>
absl::StatusOr<std::shared_ptr<const MergedMetadata>> GetOrBuild(
    const std::string& directory, const Digest& key,
    const std::vector<std::shared_ptr<Blob>>& blobs, const Build& build) {
  const std::string path = MetadataPath(directory, key.Hex());
  absl::StatusOr<MergedMetadata> metadata = OpenCached(path);
  if (!metadata.ok()) {
    if (!absl::IsNotFound(metadata.status())) {
      spdlog::warn("metadata is built again: {}", std::string(metadata.status().message()));
    }
    {
      ASSIGN_OR_RETURN(const std::string content, build());
      RETURN_IF_ERROR(WriteSealed(path, content));
    }
    // That needs many small pieces of memory for a moment, and the engine lives long.
    ::malloc_trim(0);
    for (const auto& blob : blobs) DropResident(blob->metadata());
    metadata = OpenCached(path);
    RETURN_IF_ERROR(metadata.status());
  }
  return std::make_shared<const MergedMetadata>(*std::move(metadata));
}

}  // namespace

std::string LayerMetadataName(const chunkstore::LayerDescriptor& layer) {
  return LayerKey(layer).Hex();
}

absl::StatusOr<LayerMetadata> GetLayerMetadata(const std::string& directory,
                                               const std::shared_ptr<Blob>& blob) {
  const Digest key = LayerKey(blob->descriptor());
  LayerMetadata layer;
  ASSIGN_OR_RETURN(layer.metadata,
                   GetOrBuild(directory, key, {blob}, [&] { return BuildLayer(blob, key); }));
  ASSIGN_OR_RETURN(layer.marks, MarksIn(*layer.metadata));
  return layer;
}

std::string MetadataPath(const std::string& directory, const std::string& name) {
  return fmt::format("{}/{}/metadata", directory, name);
}

std::string MergedMetadataName(std::span<const chunkstore::LayerDescriptor> layers) {
  return CacheKey(layers).Hex();
}

absl::StatusOr<std::shared_ptr<const MergedMetadata>> OpenMergedMetadata(const std::string& path) {
  ASSIGN_OR_RETURN(MergedMetadata metadata, OpenCached(path));
  return std::make_shared<const MergedMetadata>(std::move(metadata));
}

absl::StatusOr<std::shared_ptr<const MergedMetadata>> GetMergedMetadata(
    const std::string& directory, const std::vector<std::shared_ptr<Blob>>& blobs) {
  std::vector<chunkstore::LayerDescriptor> layers;
  layers.reserve(blobs.size());
  for (const auto& blob : blobs) layers.push_back(blob->descriptor());
  const Digest key = CacheKey(layers);
  return GetOrBuild(directory, key, blobs, [&] { return BuildMerged(blobs, key); });
}

}  // namespace lamina::fs
