// SPDX-License-Identifier: Apache-2.0
#include "fs/image/registry_store.h"

#include <absl/time/time.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "chunkstore/base/json.h"
#include "chunkstore/registry/registry_origin.h"
#include "chunkstore/registry/repository.h"
#include "fs/image/sequential_source.h"

namespace lamina::fs {
namespace {

using oci::Descriptor;
using registry::Document;
using registry::Repository;

// Of one type for one subject.
constexpr size_t kMaxListed = 1000;

// What a document is: what the server says, or the document itself where the server says something
// else (some send everything as application/json).
absl::StatusOr<std::string> TypeOf(const Document& document) {
  if (oci::IsManifestOrIndex(document.media_type)) return document.media_type;
  absl::StatusOr<std::string> type = oci::DocumentType(document.content);
  RETURN_IF_ERROR(type.status(), "the server says it is a '{}'", document.media_type);
  return type;
}

// When what is in a list was made, by the annotation that the list repeats from it; before all others
// if it does not say.
absl::Time CreatedAt(const Descriptor& entry) {
  const auto created = entry.annotations.find(std::string(oci::kCreatedKey));
  absl::Time time = absl::InfinitePast();
  if (created != entry.annotations.end()) {
    std::string error;
    if (!absl::ParseTime(absl::RFC3339_full, created->second, &time, &error)) {
      return absl::InfinitePast();
    }
  }
  return time;
}

class RegistryStore : public ImageStore {
 public:
  explicit RegistryStore(std::shared_ptr<Repository> repository)
      : repository_(std::move(repository)), name_("docker://" + repository_->name()) {}

  const std::string& name() const override { return name_; }

  absl::StatusOr<std::vector<Descriptor>> Find(std::string_view name) const override {
    ASSIGN_OR_RETURN(const Document document, repository_->GetManifest(std::string(name)));
    Descriptor descriptor{.digest = document.digest, .size = document.content.size()};
    ASSIGN_OR_RETURN(descriptor.media_type, TypeOf(document), "{}:{}", name_, name);
    Keep(document);
    return std::vector<Descriptor>{std::move(descriptor)};
  }

  absl::StatusOr<std::string> ReadDocument(const Descriptor& descriptor,
                                           std::string_view what) const override {
    if (descriptor.size > oci::kMaxDocumentSize) {
      return absl::ResourceExhaustedError(fmt::format(
          "{}: {} bytes, more than the {} allowed", what, descriptor.size, oci::kMaxDocumentSize));
    }
    std::string content;
    if (!oci::IsManifestOrIndex(descriptor.media_type)) {
      ASSIGN_OR_RETURN(content, repository_->GetBlob(descriptor.digest, descriptor.size), "{}",
                       what);
    } else if (!FindKept(descriptor.digest, &content)) {
      ASSIGN_OR_RETURN(Document document, repository_->GetManifest(descriptor.digest.ToString()),
                       "{}", what);
      Keep(document);
      content = std::move(document.content);
    }
    if (content.size() != descriptor.size) {
      return absl::DataLossError(fmt::format("{} {} has {} bytes, its descriptor says {}", what,
                                             descriptor.digest.ToString(), content.size(),
                                             descriptor.size));
    }
    return content;
  }

  absl::StatusOr<ByteRange> OpenBlob(const Descriptor& descriptor) const override {
    const std::unique_ptr<chunkstore::Origin> origin = registry::MakeRegistryOrigin(repository_);
    ASSIGN_OR_RETURN(std::unique_ptr<chunkstore::OriginObject> object,
                     origin->Open(descriptor.digest, descriptor.size));
    return ByteRange{MakeSequentialSource(std::move(object), descriptor.size), 0, descriptor.size};
  }

  absl::StatusOr<std::shared_ptr<chunkstore::Origin>> OpenOrigin() const override {
    return std::shared_ptr<chunkstore::Origin>(registry::MakeRegistryOrigin(repository_));
  }

  absl::StatusOr<std::vector<Descriptor>> FindReferrers(
      const Digest& subject, std::string_view artifact_type) const override {
    return FindReferrersIn(repository_->registry(), subject, artifact_type);
  }

 private:
  void Keep(const Document& document) const {
    const std::lock_guard lock(mutex_);
    kept_[document.digest] = document.content;
  }
  bool FindKept(const Digest& digest, std::string* content) const {
    const std::lock_guard lock(mutex_);
    const auto found = kept_.find(digest);
    if (found == kept_.end()) return false;
    *content = found->second;
    return true;
  }

  const std::shared_ptr<Repository> repository_;
  const std::string name_;
  mutable std::mutex mutex_;
  mutable std::map<Digest, std::string> kept_;  // manifests and indexes that were read
};

absl::StatusOr<oci::Index> ParseIndex(const Document& document) {
  return oci::Index::Parse(document.content);
}

}  // namespace

absl::StatusOr<std::shared_ptr<http::Client>> ClientOf(const RegistryAccess& access) {
  if (access.client != nullptr) return access.client;
  return http::Client::Create();
}

absl::StatusOr<OpenedStore> OpenRegistryStore(const ImageReference& reference,
                                              const RegistryAccess& access) {
  ASSIGN_OR_RETURN(const registry::Reference parsed, registry::Reference::Parse(reference.path));
  ASSIGN_OR_RETURN(std::shared_ptr<http::Client> client, ClientOf(access));
  auto repository = std::make_shared<Repository>(std::move(client), access.settings, parsed.host,
                                                 parsed.repository);
  return OpenedStore{std::make_unique<RegistryStore>(std::move(repository)), parsed.TagOrDigest()};
}

std::string ReferrersTag(const Digest& subject) { return "sha256-" + subject.Hex(); }

absl::StatusOr<oci::Index> ReadReferrersTag(registry::RegistryClient& client,
                                            const Digest& subject) {
  const absl::StatusOr<Document> document = client.GetManifest(ReferrersTag(subject));
  if (absl::IsNotFound(document.status())) return oci::Index();
  RETURN_IF_ERROR(document.status(), "referrers of {}", subject.ToString());
  ASSIGN_OR_RETURN(oci::Index index, ParseIndex(*document), "referrers of {}", subject.ToString());
  return index;
}

absl::StatusOr<std::vector<Descriptor>> FindReferrersIn(registry::RegistryClient& client,
                                                        const Digest& subject,
                                                        std::string_view artifact_type) {
  std::vector<Descriptor> found;
  // Servers may leave the filter to us.
  const auto keep = [&](const oci::Index& index) {
    std::ranges::copy_if(index.manifests, std::back_inserter(found), [&](const Descriptor& entry) {
      return entry.artifact_type == artifact_type;
    });
  };
  const absl::StatusOr<std::vector<std::string>> pages =
      client.GetReferrers(subject, artifact_type);
  if (pages.ok()) {
    for (const std::string& page : *pages) {
      ASSIGN_OR_RETURN(const oci::Index index, oci::Index::Parse(page), "referrers of {}",
                       subject.ToString());
      keep(index);
    }
  } else if (absl::IsNotFound(pages.status()) || absl::IsUnimplemented(pages.status()) ||
             absl::IsInvalidArgument(pages.status())) {
    ASSIGN_OR_RETURN(const oci::Index index, ReadReferrersTag(client, subject));
    keep(index);
  } else {
    return pages.status();
  }
  if (found.size() > kMaxListed) {
    return absl::ResourceExhaustedError(fmt::format("referrers of {}: more than {} of type {}",
                                                    subject.ToString(), kMaxListed, artifact_type));
  }
  // Servers list them in any order.
  std::ranges::stable_sort(found, {}, CreatedAt);
  return found;
}

}  // namespace lamina::fs
