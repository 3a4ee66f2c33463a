// SPDX-License-Identifier: Apache-2.0
//
// One repository on one server that speaks the OCI distribution protocol (distribution-spec 1.1): the
// registry itself, or a mirror of it.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_REGISTRY_CLIENT_H_
#define LAMINA_CHUNKSTORE_REGISTRY_REGISTRY_CLIENT_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/http/client.h"
#include "chunkstore/registry/settings.h"
#include "chunkstore/registry/token_source.h"

namespace lamina::registry {

// Challenges answered for one request: to get in at all, and to get a wider scope or a new token.
inline constexpr int kMaxChallenges = 3;

// A manifest or index as the server has it. The digest is of these bytes.
struct Document {
  std::string content;
  std::string media_type;
  Digest digest;
};

enum class Access { kPull, kPush };  // the latter includes the former

// Thread-safe. Calls block; all but ReadRange and Started repeat what failed for a passing reason.
// Errors name the server; kNotFound if it says that there is no such thing.
class RegistryClient {
 public:
  struct Options {
    std::shared_ptr<http::Client> client;
    std::string host;  // of the registry, also if this is a mirror of it
    std::string repository;
    Access access = Access::kPull;
    std::string mirror_url;  // empty: the registry itself
    Settings settings;
  };
  explicit RegistryClient(Options options);

  // "registry.example:5000/library/debian", or the mirror's URL.
  const std::string& name() const { return name_; }
  bool is_mirror() const { return !options_.mirror_url.empty(); }
  // It has asked for a pause (Retry-After), which is not over. Requests that are made meanwhile wait for
  // its end, or fail at once if it is too long, or if there is another server to ask.
  bool is_busy() const { return Clock::now() < BusyUntil(); }

  // By tag or digest. If by digest, or if the server tells one, the digest is checked. What a mirror
  // has for a tag is kDataLoss if it is no manifest or index; of the registry the caller has to see.
  absl::StatusOr<Document> GetManifest(const std::string& tag_or_digest);
  // Whether it is there; nothing is said of what it is.
  absl::StatusOr<bool> HasManifest(const std::string& tag_or_digest);
  // True if the server processed the manifest's "subject" for the referrers API.
  absl::StatusOr<bool> PutManifest(const std::string& tag_or_digest, std::string_view media_type,
                                   std::string content);

  // The index of what has `digest` as its subject, from the referrers API, in the pages in which the
  // server gives it: JSON of an index each. kNotFound if the server does not have that API.
  absl::StatusOr<std::vector<std::string>> GetReferrers(const Digest& digest,
                                                        std::string_view artifact_type);

  // The repository's tags, or the first `limit` of them.
  absl::StatusOr<std::vector<std::string>> ListTags(size_t limit);

  // A whole blob of at most `size` bytes. The digest is checked.
  absl::StatusOr<std::string> GetBlob(const Digest& digest, uint64_t size);
  // Its size if it is there; 0 with kUnknownSize if the server does not tell.
  static constexpr uint64_t kUnknownSize = UINT64_MAX;
  absl::StatusOr<uint64_t> BlobSize(const Digest& digest);

  // Makes another repository's blob one of this one's, if the server knows it and allows that.
  absl::StatusOr<bool> MountBlob(const Digest& digest, const std::string& from_repository);

  // One request for a part of a blob, with a header from Authorization(): the parts of reads that
  // run side by side (see registry_origin.h) are put together from these.
  absl::StatusOr<http::Request> RangeRequest(const Digest& digest, const http::Range& range);
  // After a response: true if its 401 was a challenge of this server that has now been answered, so
  // that the request, made anew, may succeed.
  absl::StatusOr<bool> Answer(const http::Response& response, const std::string& authorization);

  // For uploads: a request with this server's settings to `path` ("blobs/uploads/") or to an URL that
  // the server gave. Sends it, and again with authorization if that is asked for.
  absl::StatusOr<http::Response> Send(const std::string& path_or_url, http::Request request);

 private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point BusyUntil() const { return Clock::time_point(busy_until_->load()); }
  // Has a request keep to the pause that the server has asked for, and take note of the next one.
  absl::Status Heed(http::Request* request) const;
  // "https://host/v2/repository/".
  absl::StatusOr<std::string> Base();
  absl::StatusOr<std::string> FindBase();
  absl::StatusOr<std::string> UrlOf(std::string_view path);
  // Whether an URL leads to this server, and may have its credentials.
  absl::StatusOr<bool> IsOurs(const std::string& url);
  bool AllowsHttp() const;
  absl::StatusOr<http::Response> Authorized(http::Request request);
  // Gets a list, page by page, until `take` wants no more. All pages together may be as long as a
  // document. Errors of the first page have their code; a list that breaks off is kUnavailable.
  absl::Status GetPages(const std::string& path, std::string_view accept, std::string_view what,
                        const std::function<absl::StatusOr<bool>(const http::Response&)>& take);
  // The URL of the next page; empty if this is the last.
  absl::StatusOr<std::string> NextPage(const http::Response& response);
  absl::Status Name(absl::Status status) const { return Annotate(std::move(status), name_); }

  const Options options_;
  const std::string name_;
  TokenSource tokens_;
  // Shared with requests, which may end after the client.
  const std::shared_ptr<std::atomic<Clock::duration>> busy_until_ =
      std::make_shared<std::atomic<Clock::duration>>();
  std::mutex mutex_;  // held while the base is being found out
  std::string base_;
};

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_REGISTRY_CLIENT_H_
