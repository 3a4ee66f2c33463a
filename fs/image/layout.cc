// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layout.h"

#include <algorithm>
#include <set>

#include "chunkstore/base/json.h"


namespace lamina::fs {
namespace {

using oci::Descriptor;

// Indexes may refer to indexes, the same one many times: this bounds the work for one image.
constexpr int kMaxIndexes = 32;

bool IsIndex(const Descriptor& descriptor) {
  return descriptor.media_type == oci::kIndexType || descriptor.media_type == oci::kDockerIndexType;
}

// BuildKit keeps attestations beside images, as manifests for the platform unknown/unknown.
bool IsImage(const Descriptor& descriptor) {
  const bool is_manifest = descriptor.media_type == oci::kManifestType ||
                           descriptor.media_type == oci::kDockerManifestType;
  return is_manifest && !(descriptor.platform && descriptor.platform->os == "unknown");
}

bool AllTheSame(const std::vector<Descriptor>& manifests) {
  return std::ranges::all_of(manifests,
                             [&](const Descriptor& m) { return m.digest == manifests[0].digest; });
}

std::string TagOf(const Descriptor& descriptor) {
  const auto name = descriptor.annotations.find(std::string(oci::kRefNameKey));
  return name == descriptor.annotations.end() ? std::string() : name->second;
}

std::string ListTags(const std::vector<Descriptor>& entries) {
  std::set<std::string> tags;
  for (const Descriptor& entry : entries) {
    tags.insert(TagOf(entry).empty() ? "(one without a tag)" : TagOf(entry));
  }
  return tags.empty() ? "there are none" : fmt::format("there are: {}", fmt::join(tags, ", "));
}

std::string ListPlatforms(const std::vector<Descriptor>& manifests) {
  std::set<std::string> platforms;
  for (const Descriptor& manifest : manifests) {
    platforms.insert(manifest.platform ? manifest.platform->ToString() : "(not given)");
  }
  return platforms.empty() ? "nothing" : fmt::format("{}", fmt::join(platforms, ", "));
}

}  // namespace

absl::Status CheckLayoutFile(std::string_view json) {
  ASSIGN_OR_RETURN(const nlohmann::json value, oci::ParseJson(json, kLayoutFile));
  ASSIGN_OR_RETURN(const oci::Field version,
                   oci::Field(value, kLayoutFile).Get("imageLayoutVersion"));
  ASSIGN_OR_RETURN(const std::string text, version.String());
  if (text != "1.0.0") return version.Error(fmt::format("'{}' is not '1.0.0'", text));
  return absl::OkStatus();
}

absl::StatusOr<Layout> Layout::OpenDirectory(const std::string& directory) {
  Layout layout(directory, std::nullopt);
  RETURN_IF_ERROR(layout.ReadIndex(), "OCI layout {}", directory);
  return layout;
}

absl::StatusOr<Layout> Layout::OpenArchive(const std::string& file) {
  ASSIGN_OR_RETURN(TarIndex archive, TarIndex::Open(file));
  Layout layout(file, std::move(archive));
  RETURN_IF_ERROR(layout.ReadIndex(), "OCI archive {}", file);
  return layout;
}

absl::Status Layout::ReadIndex() {
  ASSIGN_OR_RETURN(const FileRange marker, OpenFile(kLayoutFile));
  ASSIGN_OR_RETURN(const std::string marker_text, marker.ReadAll(oci::kMaxDocumentSize), "{}",
                   kLayoutFile);
  RETURN_IF_ERROR(CheckLayoutFile(marker_text));
  ASSIGN_OR_RETURN(const FileRange index, OpenFile(kIndexFile));
  ASSIGN_OR_RETURN(const std::string index_text, index.ReadAll(oci::kMaxDocumentSize), "{}",
                   kIndexFile);
  ASSIGN_OR_RETURN(index_, oci::Index::Parse(index_text), "{}", kIndexFile);
  return absl::OkStatus();
}

absl::StatusOr<FileRange> Layout::OpenFile(std::string_view name) const {
  if (archive_) return archive_->Find(name);
  return FileRange::Open(fmt::format("{}/{}", path_, name));
}

absl::StatusOr<FileRange> Layout::OpenBlob(const Descriptor& descriptor) const {
  ASSIGN_OR_RETURN(FileRange blob,
                   OpenFile(fmt::format("{}/{}", kBlobsDirectory, descriptor.digest.Hex())));
  if (blob.size != descriptor.size) {
    return absl::DataLossError(fmt::format("blob {} has {} bytes, its descriptor says {}",
                                           descriptor.digest.ToString(), blob.size,
                                           descriptor.size));
  }
  return blob;
}

absl::StatusOr<std::string> Layout::ReadDocument(const Descriptor& descriptor,
                                                 std::string_view what) const {
  ASSIGN_OR_RETURN(const FileRange blob, OpenBlob(descriptor), "{}", what);
  ASSIGN_OR_RETURN(std::string text, blob.ReadAll(oci::kMaxDocumentSize), "{} {}", what,
                   descriptor.digest.ToString());
  const Digest actual = Digest::Of(AsBytes(text));
  if (actual != descriptor.digest) {
    return absl::DataLossError(
        fmt::format("{}: digest mismatch: {} was expected, the content has {}", what,
                    descriptor.digest.ToString(), actual.ToString()));
  }
  return text;
}

absl::StatusOr<std::vector<Descriptor>> Layout::CollectManifests(
    std::vector<Descriptor> entries) const {
  std::vector<Descriptor> manifests;
  int indexes = 0;
  while (!entries.empty()) {
    const Descriptor entry = std::move(entries.back());
    entries.pop_back();
    if (IsImage(entry)) manifests.push_back(entry);
    if (!IsIndex(entry)) continue;
    if (++indexes > kMaxIndexes) {
      return absl::ResourceExhaustedError(
          fmt::format("an image made of more than {} indexes", kMaxIndexes));
    }
    ASSIGN_OR_RETURN(const std::string text, ReadDocument(entry, "index"));
    ASSIGN_OR_RETURN(const oci::Index index, oci::Index::Parse(text));
    entries.insert(entries.end(), index.manifests.begin(), index.manifests.end());
  }
  return manifests;
}

absl::StatusOr<Descriptor> Layout::FindManifest(std::string_view tag,
                                                const oci::Platform& platform) const {
  std::vector<Descriptor> entries = index_.manifests;
  if (!tag.empty()) {
    std::erase_if(entries, [&](const Descriptor& entry) { return TagOf(entry) != tag; });
    if (entries.empty()) {
      return absl::NotFoundError(fmt::format("{}: no image with the tag '{}'; {}", path_, tag,
                                             ListTags(index_.manifests)));
    }
  }
  const auto other_tag = [&](const Descriptor& entry) { return TagOf(entry) != TagOf(entries[0]); };
  if (entries.empty() || std::any_of(entries.begin(), entries.end(), other_tag)) {
    return absl::NotFoundError(fmt::format(
        "{}: a tag is needed, as there is not just one image; {}", path_, ListTags(entries)));
  }
  ASSIGN_OR_RETURN(const std::vector<Descriptor> manifests, CollectManifests(entries), "{}", path_);
  std::vector<Descriptor> matching = manifests;
  std::erase_if(matching, [&](const Descriptor& manifest) {
    return manifest.platform && !platform.Matches(*manifest.platform);
  });
  if (matching.empty() && AllTheSame(manifests)) matching = manifests;
  if (matching.empty()) {
    return absl::NotFoundError(fmt::format("{}: no image for the platform {}; there is {}", path_,
                                           platform.ToString(), ListPlatforms(manifests)));
  }
  if (!AllTheSame(matching)) {
    return absl::NotFoundError(
        fmt::format("{}: {} images fit the platform {} ({}); name one that only one of them fits",
                    path_, matching.size(), platform.ToString(), ListPlatforms(matching)));
  }
  return matching[0];
}

}  // namespace lamina::fs
