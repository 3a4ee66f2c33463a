// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/repository.h"

#include <spdlog/spdlog.h>

namespace lamina::registry {

Repository::Repository(std::shared_ptr<http::Client> client, const Settings& settings,
                       std::string host, std::string repository, Access access)
    : http_(std::move(client)), host_(std::move(host)), repository_(std::move(repository)) {
  RegistryClient::Options options{.client = http_,
                                  .host = host_,
                                  .repository = repository_,
                                  .access = access,
                                  .settings = settings};
  for (const Mirror& mirror : settings.mirrors) {
    if (!mirror.registry.empty() && mirror.registry != host_) continue;
    options.mirror_url = mirror.url;
    sources_.push_back(std::make_unique<Source>(options));
  }
  options.mirror_url.clear();
  sources_.push_back(std::make_unique<Source>(std::move(options)));
}

void Source::PassOver(const absl::Status& why) {
  spdlog::warn("mirror passed over: {}", std::string(why.message()));
  if (!absl::IsNotFound(why)) SetDown();
}

std::vector<Source*> Repository::Sources() {
  std::vector<Source*> usable;
  for (const auto& source : sources_) {
    if (!source->is_down() || source == sources_.back()) usable.push_back(source.get());
  }
  return usable;
}

bool Repository::SetMirrorsDown() {
  for (const auto& source : sources_) {
    if (source->client().is_mirror()) source->SetDown();
  }
  return sources_.size() > 1;
}

template <typename Result>
absl::StatusOr<Result> Repository::Ask(
    const std::function<absl::StatusOr<Result>(RegistryClient&)>& question) {
  const std::vector<Source*> sources = Sources();
  for (size_t i = 0; i + 1 < sources.size(); ++i) {
    absl::StatusOr<Result> answer = question(sources[i]->client());
    if (answer.ok()) return answer;
    if (!absl::IsNotFound(answer.status())) sources[i]->PassOver(answer.status());
  }
  return question(sources.back()->client());
}

absl::StatusOr<Document> Repository::GetManifest(const std::string& tag_or_digest) {
  return Ask<Document>([&](RegistryClient& client) { return client.GetManifest(tag_or_digest); });
}

absl::StatusOr<std::string> Repository::GetBlob(const Digest& digest, uint64_t size) {
  return Ask<std::string>([&](RegistryClient& client) { return client.GetBlob(digest, size); });
}

absl::StatusOr<uint64_t> Repository::BlobSize(const Digest& digest) {
  return Ask<uint64_t>([&](RegistryClient& client) { return client.BlobSize(digest); });
}

}  // namespace lamina::registry
