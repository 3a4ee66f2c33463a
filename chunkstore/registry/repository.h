// SPDX-License-Identifier: Apache-2.0
//
// A repository of a registry, wherever it can be had: the mirrors that were named for it, in order,
// then the registry itself.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_REPOSITORY_H_
#define LAMINA_CHUNKSTORE_REGISTRY_REPOSITORY_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/registry/reference.h"
#include "chunkstore/registry/registry_client.h"

namespace lamina::registry {

// One server for the content, and whether it is any good. Thread-safe.
class Source {
 public:
  explicit Source(RegistryClient::Options options) : client_(std::move(options)) {}

  RegistryClient& client() { return client_; }
  // It failed, and the next one is asked; for a while it is not asked first any more, unless it just
  // has not got what was wanted.
  void PassOver(const absl::Status& why);
  // A server that failed is passed over for a while, if there is another one.
  void SetDown() { down_until_ = (Clock::now() + kDownTime).time_since_epoch(); }
  bool is_down() const { return Clock::now().time_since_epoch() < down_until_.load(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kDownTime = std::chrono::seconds(30);

  RegistryClient client_;
  std::atomic<Clock::duration> down_until_{};
};

// Thread-safe. Nothing goes over the network before the first read.
class Repository {
 public:
  Repository(std::shared_ptr<http::Client> client, const Settings& settings, std::string host,
             std::string repository, Access access = Access::kPull);

  const std::string& host() const { return host_; }
  const std::string& repository() const { return repository_; }
  // "registry.example:5000/library/debian".
  std::string name() const { return host_ + "/" + repository_; }
  http::Client& http() { return *http_; }

  // The registry itself, for whatever is not just reading.
  RegistryClient& registry() { return sources_.back()->client(); }
  // In the order in which they are to be asked; the registry itself is the last and always there.
  std::vector<Source*> Sources();

  // Passes all mirrors over for a while. False if there are none.
  bool SetMirrorsDown();

  // From the first source that has it. The error is the registry's own.
  absl::StatusOr<Document> GetManifest(const std::string& tag_or_digest);
  absl::StatusOr<std::string> GetBlob(const Digest& digest, uint64_t size);
  absl::StatusOr<uint64_t> BlobSize(const Digest& digest);

 private:
  template <typename Result>
  absl::StatusOr<Result> Ask(
      const std::function<absl::StatusOr<Result>(RegistryClient&)>& question);

  const std::shared_ptr<http::Client> http_;
  const std::string host_;
  const std::string repository_;
  std::vector<std::unique_ptr<Source>> sources_;
};

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_REPOSITORY_H_
