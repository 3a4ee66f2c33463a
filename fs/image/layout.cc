// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layout.h"

#include <algorithm>
#include <set>

#include "chunkstore/base/json.h"
#include "chunkstore/oci_layout_origin.h"

namespace lamina::fs {
namespace {

using oci::Descriptor;

// What is attached to the images of a layout has to be read to know which: this bounds the work.
constexpr int kMaxReferrers = 1000;

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
  ASSIGN_OR_RETURN(const ByteRange marker, OpenFile(kLayoutFile));
  ASSIGN_OR_RETURN(const std::string marker_text, marker.ReadAll(oci::kMaxDocumentSize), "{}",
                   kLayoutFile);
  RETURN_IF_ERROR(CheckLayoutFile(marker_text));
  ASSIGN_OR_RETURN(const ByteRange index, OpenFile(kIndexFile));
  ASSIGN_OR_RETURN(const std::string index_text, index.ReadAll(oci::kMaxDocumentSize), "{}",
                   kIndexFile);
  ASSIGN_OR_RETURN(index_, oci::Index::Parse(index_text), "{}", kIndexFile);
  return absl::OkStatus();
}

absl::StatusOr<ByteRange> Layout::OpenFile(std::string_view name) const {
  if (archive_) return archive_->Find(name);
  return ByteRange::Open(fmt::format("{}/{}", path_, name));
}

absl::StatusOr<ByteRange> Layout::OpenBlob(const Descriptor& descriptor) const {
  ASSIGN_OR_RETURN(ByteRange blob,
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
  ASSIGN_OR_RETURN(const ByteRange blob, OpenBlob(descriptor), "{}", what);
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

absl::StatusOr<std::vector<Descriptor>> Layout::Find(std::string_view tag) const {
  std::vector<Descriptor> entries = index_.manifests;
  if (tag.empty()) {  // what is attached to an image is none
    std::erase_if(entries, [](const Descriptor& entry) { return !entry.artifact_type.empty(); });
  } else {
    std::erase_if(entries, [&](const Descriptor& entry) { return TagOf(entry) != tag; });
    if (const absl::StatusOr<Digest> digest = Digest::Parse(tag); entries.empty() && digest.ok()) {
      ASSIGN_OR_RETURN(Descriptor manifest, FindByDigest(*digest), "{}", path_);
      return std::vector<Descriptor>{std::move(manifest)};
    }
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
  return entries;
}

absl::StatusOr<Descriptor> Layout::FindByDigest(const Digest& digest) const {
  ASSIGN_OR_RETURN(const ByteRange blob,
                   OpenFile(fmt::format("{}/{}", kBlobsDirectory, digest.Hex())));
  Descriptor manifest{
      .media_type = std::string(oci::kManifestType), .digest = digest, .size = blob.size};
  ASSIGN_OR_RETURN(const std::string text, ReadDocument(manifest, "manifest"));
  ASSIGN_OR_RETURN(manifest.media_type, oci::DocumentType(text));
  return manifest;
}

std::string Layout::FileOf(const Digest& digest) const {
  return archive_ ? "" : fmt::format("{}/{}/{}", path_, kBlobsDirectory, digest.Hex());
}

absl::StatusOr<std::shared_ptr<chunkstore::Origin>> Layout::OpenOrigin() const {
  if (archive_) return absl::UnimplementedError(path_ + ": an archive cannot be read in parts");
  return chunkstore::OpenOciLayoutOrigin(path_);
}

absl::StatusOr<std::vector<Descriptor>> Layout::FindReferrers(
    const Digest& subject, std::string_view artifact_type) const {
  std::vector<Descriptor> found;
  int read = 0;
  for (const Descriptor& entry : index_.manifests) {
    if (entry.artifact_type != artifact_type || entry.media_type != oci::kManifestType) continue;
    if (++read > kMaxReferrers) {
      return absl::ResourceExhaustedError(fmt::format("{}: more than {} artifacts of type {}",
                                                      path_, kMaxReferrers, artifact_type));
    }
    ASSIGN_OR_RETURN(const std::string text, ReadDocument(entry, "artifact manifest"), "{}", path_);
    ASSIGN_OR_RETURN(const oci::Manifest manifest, oci::Manifest::Parse(text), "{}: artifact {}",
                     path_, entry.digest.ToString());
    if (manifest.subject && manifest.subject->digest == subject) found.push_back(entry);
  }
  return found;
}

}  // namespace lamina::fs
