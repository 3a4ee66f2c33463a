// SPDX-License-Identifier: Apache-2.0
#include "fs/image/registry_writer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "chunkstore/registry/reference.h"
#include "chunkstore/registry/registry_client.h"
#include "chunkstore/registry/upload.h"
#include "fs/image/registry_store.h"

namespace lamina::fs {
namespace {

using oci::Descriptor;
using registry::Document;
using registry::RegistryClient;

// Manifests of the destination that are looked through for layers that are converted already.
constexpr size_t kMaxManifests = 64;
// Times that the index of referrers is written before giving up because others write it as well.
constexpr int kReferrersAttempts = 5;

std::string Annotation(const Descriptor& descriptor, std::string_view key) {
  const auto annotation = descriptor.annotations.find(std::string(key));
  return annotation == descriptor.annotations.end() ? std::string() : annotation->second;
}

// Puts a descriptor into the index of a subject's referrers, which stands in for the referrers API.
// Other writers may do so at the same time, and the protocol knows no locks: what was overwritten is
// written again.
absl::Status AddToReferrersTag(RegistryClient& client, const Digest& subject,
                               const Descriptor& descriptor) {
  for (int attempt = 0; attempt < kReferrersAttempts; ++attempt) {
    ASSIGN_OR_RETURN(oci::Index index, ReadReferrersTag(client, subject));
    const auto is_it = [&](const Descriptor& other) { return other.digest == descriptor.digest; };
    const auto found = std::ranges::find_if(index.manifests, is_it);
    // The newest is the last.
    if (found != index.manifests.end() && (attempt > 0 || found + 1 == index.manifests.end())) {
      return absl::OkStatus();
    }
    std::erase_if(index.manifests, is_it);
    index.manifests.push_back(descriptor);
    RETURN_IF_ERROR(
        client.PutManifest(ReferrersTag(subject), oci::kIndexType, index.ToJson()).status());
  }
  return absl::UnavailableError(fmt::format("{}: others keep writing it", ReferrersTag(subject)));
}

class RegistryWriter : public ImageWriter {
 public:
  RegistryWriter(RegistryClient::Options options, registry::Reference reference,
                 std::string from_repository)
      : client_(std::move(options)),
        reference_(std::move(reference)),
        from_repository_(std::move(from_repository)) {}

  absl::StatusOr<std::unique_ptr<chunkstore::BlobOutput>> NewBlob() override {
    return registry::StartUpload(client_);
  }

  absl::StatusOr<Transfer> AddFrom(const ImageStore& store, const Descriptor& blob) override {
    const absl::StatusOr<uint64_t> size = client_.BlobSize(blob.digest);
    if (size.ok() && (*size == blob.size || *size == RegistryClient::kUnknownSize)) {
      return Transfer::kThere;
    }
    if (!size.ok() && !absl::IsNotFound(size.status())) return size.status();
    if (const std::string repository = RepositoryBeside(store); !repository.empty()) {
      ASSIGN_OR_RETURN(const bool mounted, client_.MountBlob(blob.digest, repository));
      if (mounted) return Transfer::kMounted;
    }
    ASSIGN_OR_RETURN(const std::unique_ptr<chunkstore::BlobOutput> output, NewBlob());
    RETURN_IF_ERROR(CopyBlob(store, blob, *output));
    return Transfer::kCopied;
  }

  absl::Status AddBlob(std::string_view content) override {
    return registry::PutBlob(client_, content, from_repository_);
  }

  absl::Status AddManifest(const Descriptor& descriptor, std::string_view content) override {
    return client_
        .PutManifest(descriptor.digest.ToString(), descriptor.media_type, std::string(content))
        .status();
  }

  absl::Status CommitImage(const Descriptor& descriptor, std::string_view content) override {
    return client_.PutManifest(reference_.tag, descriptor.media_type, std::string(content))
        .status();
  }

  absl::Status Attach(const Descriptor& descriptor, const Digest& subject,
                      std::string_view content) override {
    ASSIGN_OR_RETURN(const bool there, client_.HasManifest(subject.ToString()));
    if (!there) {
      return absl::NotFoundError(
          fmt::format("{}: has no manifest {} that something could be attached to", client_.name(),
                      subject.ToString()));
    }
    ASSIGN_OR_RETURN(const bool processed,
                     client_.PutManifest(descriptor.digest.ToString(), descriptor.media_type,
                                         std::string(content)));
    if (processed) return absl::OkStatus();
    return AddToReferrersTag(client_, subject, descriptor);
  }

  std::map<Digest, Descriptor> FindConverted(const std::set<Digest>& sources,
                                             std::string_view converter) override {
    std::map<Digest, Descriptor> found;
    absl::StatusOr<std::vector<std::string>> tags = client_.ListTags(kMaxManifests);
    if (!tags.ok()) {
      // A repository that is not there yet; or a server that does not list tags: try the one we know.
      tags = std::vector<std::string>();
    }
    std::erase(*tags, reference_.tag);
    if (!reference_.tag.empty()) tags->insert(tags->begin(), reference_.tag);
    size_t left = kMaxManifests;
    for (const std::string& tag : *tags) {
      if (found.size() == sources.size()) break;
      FindIn(tag, sources, converter, found, left);
    }
    return found;
  }

 private:
  // The repository that a store is, if it is another one of this registry.
  std::string RepositoryBeside(const ImageStore& store) const {
    constexpr std::string_view kTransport = "docker://";
    if (!store.name().starts_with(kTransport)) return "";
    const auto other = registry::Reference::Parse(store.name().substr(kTransport.size()));
    const bool beside =
        other.ok() && other->host == reference_.host && other->repository != reference_.repository;
    return beside ? other->repository : "";
  }

  // Looks at the manifest, or at those in the index. What cannot be read is passed over.
  void FindIn(const std::string& tag_or_digest, const std::set<Digest>& sources,
              std::string_view converter, std::map<Digest, Descriptor>& found, size_t& left) {
    if (left == 0) return;
    --left;
    const absl::StatusOr<Document> document = client_.GetManifest(tag_or_digest);
    if (!document.ok()) return;
    if (const auto index = oci::Index::Parse(document->content); index.ok()) {
      for (const Descriptor& manifest : index->manifests) {
        FindIn(manifest.digest.ToString(), sources, converter, found, left);
      }
      return;
    }
    const absl::StatusOr<oci::Manifest> manifest = oci::Manifest::Parse(document->content);
    if (!manifest.ok()) return;
    for (const Descriptor& layer : manifest->layers) {
      const absl::StatusOr<Digest> source = Digest::Parse(Annotation(layer, oci::kSourceDigestKey));
      const bool fits = source.ok() && sources.contains(*source) && !found.contains(*source) &&
                        Annotation(layer, oci::kConverterKey) == converter &&
                        layer.ToLayerDescriptor().ok();
      if (!fits) continue;
      const absl::StatusOr<uint64_t> size = client_.BlobSize(layer.digest);
      if (size.ok() && (*size == layer.size || *size == RegistryClient::kUnknownSize)) {
        found.emplace(*source, layer);
      }
    }
  }

  RegistryClient client_;
  const registry::Reference reference_;
  const std::string from_repository_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ImageWriter>> OpenRegistryWriter(const ImageReference& destination,
                                                                const RegistryAccess& access,
                                                                std::string from_repository) {
  ASSIGN_OR_RETURN(registry::Reference reference, registry::Reference::Parse(destination.path));
  if (reference.digest) {
    return absl::InvalidArgumentError(
        fmt::format("docker://{}: a destination has a tag, not a digest", destination.path));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<http::Client> client, ClientOf(access));
  RegistryClient::Options options{.client = std::move(client),
                                  .host = reference.host,
                                  .repository = reference.repository,
                                  .access = registry::Access::kPush,
                                  .settings = access.settings};
  return std::make_unique<RegistryWriter>(std::move(options), std::move(reference),
                                          std::move(from_repository));
}

}  // namespace lamina::fs
