// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/image_cache.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"
#include "fs/engine/metadata_cache.h"

namespace lamina::fs {
namespace {

using chunkstore::BlobStore;
using chunkstore::LayerDescriptor;
using nlohmann::json;

constexpr uint64_t kMaxRecord = 16 << 20;
constexpr std::string_view kDigestPrefix = "sha256:";
constexpr std::string_view kRecordSuffix = ".json";
constexpr size_t kMinDigits = 12;

std::string ToText(const ImageRecord& record) {
  json layers = json::array();
  for (const LayerDescriptor& layer : record.layers) {
    layers.push_back({{"digest", layer.digest.ToString()},
                      {"size", layer.size},
                      {"section_table_offset", layer.section_table_offset},
                      {"section_table_digest", layer.section_table_digest.ToString()}});
  }
  const json object = {{"image", record.image},
                       {"manifest_digest", record.manifest_digest.ToString()},
                       {"pinned", record.pinned},
                       {"layers", layers}};
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<LayerDescriptor> ParseLayer(const oci::Field& field) {
  LayerDescriptor layer;
  ASSIGN_OR_RETURN(const oci::Field digest, field.Get("digest"));
  ASSIGN_OR_RETURN(layer.digest, digest.AsDigest());
  ASSIGN_OR_RETURN(const oci::Field size, field.Get("size"));
  ASSIGN_OR_RETURN(layer.size, size.Size());
  ASSIGN_OR_RETURN(const oci::Field offset, field.Get("section_table_offset"));
  ASSIGN_OR_RETURN(layer.section_table_offset, offset.Size());
  ASSIGN_OR_RETURN(const oci::Field table, field.Get("section_table_digest"));
  ASSIGN_OR_RETURN(layer.section_table_digest, table.AsDigest());
  return layer;
}

absl::StatusOr<ImageRecord> ReadRecord(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path, kMaxRecord));
  ASSIGN_OR_RETURN(const json object, oci::ParseJson(text, path));
  const oci::Field root(object, path);
  ImageRecord record;
  ASSIGN_OR_RETURN(const oci::Field image, root.Get("image"));
  ASSIGN_OR_RETURN(record.image, image.String());
  ASSIGN_OR_RETURN(const oci::Field digest, root.Get("manifest_digest"));
  ASSIGN_OR_RETURN(record.manifest_digest, digest.AsDigest());
  record.pinned = object.value("pinned", json()) == true;
  ASSIGN_OR_RETURN(const oci::Field layers, root.Get("layers"));
  ASSIGN_OR_RETURN(const std::vector<oci::Field> elements, layers.Elements());
  for (const oci::Field& element : elements) {
    ASSIGN_OR_RETURN(LayerDescriptor layer, ParseLayer(element));
    record.layers.push_back(std::move(layer));
  }
  return record;
}

void RemoveAll(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) spdlog::warn("remove {}: {}", path.native(), error.message());
}

}  // namespace

ImageRecord RecordOf(const Image& image) {
  return {
      .image = image.reference, .manifest_digest = image.manifest_digest, .layers = image.layers};
}

Digest DigestOfImages(std::span<const Digest> manifests) {
  if (manifests.size() == 1) return manifests[0];
  Hasher hasher;
  for (const Digest& manifest : manifests) {
    hasher.Update(std::as_bytes(std::span(manifest.bytes)));
  }
  return hasher.Finish();
}

ImageRecord RecordOf(std::span<const Image> images) {
  ImageRecord record;
  std::vector<Digest> manifests;
  for (const Image& image : images) {
    if (!record.image.empty()) record.image += " + ";
    record.image += image.reference;
    manifests.push_back(image.manifest_digest);
    record.layers.insert(record.layers.end(), image.layers.begin(), image.layers.end());
  }
  record.manifest_digest = DigestOfImages(manifests);
  return record;
}

bool ImageCache::Known::IsUsed(const std::set<Digest>& used_layers) const {
  if (users > 0) return true;
  return !record.layers.empty() &&
         std::ranges::all_of(record.layers, [&used_layers](const LayerDescriptor& layer) {
           return used_layers.contains(layer.Key());
         });
}

ImageCache::ImageCache(std::string directory, BlobStore& store)
    : directory_(std::move(directory)), store_(store) {
  Load();
}

void ImageCache::Load() {
  std::error_code error;
  std::filesystem::directory_iterator entries(directory_, error);
  for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
    const std::string path = entries->path().string();
    if (!path.ends_with(kRecordSuffix)) continue;
    absl::StatusOr<ImageRecord> record = ReadRecord(path);
    if (record.ok() && PathOf(record->manifest_digest) != path) {
      record = absl::DataLossError("it is of another image");
    }
    if (!record.ok()) {
      spdlog::warn("image record {} is dropped: {}", path, std::string(record.status().message()));
      RemoveAll(path);
      continue;
    }
    const Digest manifest = record->manifest_digest;
    images_[manifest].record = *std::move(record);
  }
  ApplyPins();
}

std::string ImageCache::PathOf(const Digest& manifest) const {
  return fmt::format("{}/{}{}", directory_, manifest.Hex(), kRecordSuffix);
}

absl::Status ImageCache::Save(const ImageRecord& record) const {
  // Not synced: a record that is damaged by a machine crash is dropped.
  return WriteFileAtomically(PathOf(record.manifest_digest), ToText(record), 0600,
                             Durability::kCached);
}

void ImageCache::Drop(const Digest& manifest) {
  RemoveAll(PathOf(manifest));
  images_.erase(manifest);
}

void ImageCache::ApplyPins() {
  std::vector<Digest> pinned;
  for (const auto& [manifest, known] : images_) {
    if (!known.record.pinned) continue;
    for (const LayerDescriptor& layer : known.record.layers) pinned.push_back(layer.Key());
  }
  store_.SetPinned(pinned);
}

std::shared_ptr<void> ImageCache::Use(const ImageRecord& image) {
  const Digest manifest = image.manifest_digest;
  std::lock_guard lock(mutex_);
  Known& known = images_[manifest];
  const bool is_same = known.record.image == image.image && known.record.layers == image.layers;
  const bool pinned = known.record.pinned;
  known.record = image;
  known.record.pinned = pinned;
  ++known.users;
  // One that is written already needs no more than its time.
  if (!is_same || ::utimensat(AT_FDCWD, PathOf(manifest).c_str(), nullptr, 0) != 0) {
    if (absl::Status status = Save(known.record); !status.ok()) {
      // On a full disk, for example. Until the next use the image's blobs are nobody's.
      spdlog::warn("{}", std::string(status.message()));
    }
  }
  return {&known, [this, manifest](Known* used) {
            std::lock_guard lock(mutex_);
            --used->users;
            ::utimensat(AT_FDCWD, PathOf(manifest).c_str(), nullptr, 0);
          }};
}

std::shared_ptr<void> ImageCache::UseLayers(std::vector<LayerDescriptor> layers) {
  std::lock_guard lock(mutex_);
  const auto used = used_layers_.insert(used_layers_.end(), std::move(layers));
  return {&*used, [this, used](void*) {
            std::lock_guard lock(mutex_);
            used_layers_.erase(used);
          }};
}

std::set<Digest> ImageCache::LayersInUse() const {
  std::set<Digest> keys;
  for (const auto& layers : used_layers_) {
    for (const LayerDescriptor& layer : layers) keys.insert(layer.Key());
  }
  return keys;
}

CacheReport ImageCache::Report() {
  CacheReport report{.usage = store_.GetUsage()};
  std::map<Digest, const BlobStore::BlobUsage*> blobs;
  for (const BlobStore::BlobUsage& blob : report.usage.blobs) blobs[blob.key] = &blob;
  std::lock_guard lock(mutex_);
  const std::set<Digest> used = LayersInUse();
  for (const auto& [manifest, known] : images_) {
    CachedImage image{.image = known.record.image,
                      .manifest_digest = manifest,
                      .pinned = known.record.pinned,
                      .mounted = known.IsUsed(used)};
    for (const LayerDescriptor& layer : known.record.layers) {
      image.layers.push_back(layer.digest);
      const auto blob = blobs.find(layer.Key());
      if (blob == blobs.end()) continue;
      image.content_bytes += blob->second->content_bytes;
      image.present_bytes += blob->second->present_bytes;
    }
    struct stat info {};
    if (::stat(PathOf(manifest).c_str(), &info) == 0) image.last_used = info.st_mtim.tv_sec;
    report.images.push_back(std::move(image));
  }
  std::ranges::sort(report.images, {}, &CachedImage::image);
  return report;
}

absl::StatusOr<CacheCleanup> ImageCache::Clean(std::optional<uint64_t> bytes) {
  CacheCleanup cleanup;
  const BlobStore::Usage before = store_.GetUsage();
  store_.Shrink(bytes.value_or(before.limit_bytes));
  const CacheReport report = Report();
  std::lock_guard lock(mutex_);
  const std::set<Digest> used = LayersInUse();
  for (const CachedImage& image : report.images) {
    const auto known = images_.find(image.manifest_digest);
    if (known == images_.end() || known->second.IsUsed(used) || known->second.record.pinned) {
      continue;
    }
    if (image.present_bytes > 0) continue;
    Drop(image.manifest_digest);
    ++cleanup.removed_images;
  }
  RemoveUnneeded(&cleanup);
  const uint64_t after = store_.GetUsage().used_bytes;
  cleanup.freed_bytes = before.used_bytes - std::min(before.used_bytes, after);
  return cleanup;
}

void ImageCache::RemoveUnneeded(CacheCleanup* cleanup) {
  std::set<Digest> blobs;
  std::set<std::string> names;
  const auto need = [&](const std::vector<LayerDescriptor>& layers) {
    if (!layers.empty()) names.insert(MergedMetadataName(layers));
    for (const LayerDescriptor& layer : layers) {
      blobs.insert(layer.Key());
      names.insert(LayerMetadataName(layer));
    }
  };
  for (const auto& [manifest, known] : images_) {
    names.insert(std::filesystem::path(PathOf(manifest)).filename());
    need(known.record.layers);
  }
  for (const auto& layers : used_layers_) need(layers);
  for (const BlobStore::BlobUsage& blob : store_.GetUsage().blobs) {
    if (blobs.contains(blob.key) || blob.attached) continue;
    if (absl::Status status = store_.Remove(blob.key); status.ok()) {
      ++cleanup->removed_blobs;
    } else {
      spdlog::warn("{}", std::string(status.message()));
    }
  }
  std::error_code error;
  std::filesystem::directory_iterator entries(directory_, error);
  for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
    if (!names.contains(entries->path().filename())) RemoveAll(entries->path());
  }
}

absl::Status ImageCache::Pin(const ImageRecord& image) {
  std::lock_guard lock(mutex_);
  ImageRecord record = image;
  record.pinned = true;
  RETURN_IF_ERROR(Save(record));
  images_[image.manifest_digest].record = std::move(record);
  ApplyPins();
  return absl::OkStatus();
}

std::vector<Digest> ImageCache::Find(const std::string& name) const {
  std::vector<Digest> found;
  const bool is_digest =
      name.starts_with(kDigestPrefix) && name.size() >= kDigestPrefix.size() + kMinDigits;
  for (const auto& [manifest, known] : images_) {
    if (is_digest ? manifest.ToString().starts_with(name) : known.record.image == name) {
      found.push_back(manifest);
    }
  }
  return found;
}

absl::Status ImageCache::SetPinned(const std::string& name, bool pinned) {
  std::lock_guard lock(mutex_);
  const std::vector<Digest> found = Find(name);
  if (found.empty()) return absl::NotFoundError(fmt::format("there is no image {} here", name));
  for (const Digest& manifest : found) {
    ImageRecord record = images_[manifest].record;
    record.pinned = pinned;
    RETURN_IF_ERROR(Save(record));
    images_[manifest].record = std::move(record);
  }
  ApplyPins();
  return absl::OkStatus();
}

absl::StatusOr<CacheCleanup> ImageCache::Remove(const std::string& name) {
  CacheCleanup cleanup;
  const uint64_t before = store_.GetUsage().used_bytes;
  std::lock_guard lock(mutex_);
  const std::vector<Digest> found = Find(name);
  if (found.empty()) return absl::NotFoundError(fmt::format("there is no image {} here", name));
  const std::set<Digest> used = LayersInUse();
  for (const Digest& manifest : found) {
    if (!images_[manifest].IsUsed(used)) continue;
    return absl::FailedPreconditionError(fmt::format("image {} is mounted", name));
  }
  for (const Digest& manifest : found) {
    Drop(manifest);
    ++cleanup.removed_images;
  }
  ApplyPins();
  RemoveUnneeded(&cleanup);
  const uint64_t after = store_.GetUsage().used_bytes;
  cleanup.freed_bytes = before - std::min(before, after);
  return cleanup;
}

}  // namespace lamina::fs
