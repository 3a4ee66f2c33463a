// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/registry_client.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"
#include "chunkstore/http/url.h"
#include "chunkstore/registry/ca_file.h"
#include "chunkstore/registry/errors.h"
#include "chunkstore/registry/link.h"
#include "chunkstore/registry/reference.h"

namespace lamina::registry {
namespace {

// What manifests are asked for as; a server may convert between them or refuse what is not listed.
constexpr std::array<std::string_view, 4> kManifestTypes = {
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json"};
// A server's mistake should not last longer, whatever pause it asks for.
constexpr std::chrono::seconds kMaxPause = std::chrono::minutes(5);
// Pages of a list, which its server might never end.
constexpr int kMaxPages = 100;
constexpr std::string_view kIndexType = "application/vnd.oci.image.index.v1+json";

std::string_view WithoutPort(std::string_view host) {
  return host.ends_with(']') ? host : host.substr(0, host.rfind(':'));
}

// Where the registry of Docker Hub is, whose name is that of the web site.
std::string ApiHost(const std::string& host) {
  return host == "docker.io" ? "registry-1.docker.io" : host;
}

std::string NameOf(const RegistryClient::Options& options) {
  if (!options.mirror_url.empty()) return options.mirror_url;
  return fmt::format("{}/{}", options.host, options.repository);
}

// A file that the user named stands before those that are set up for the registry.
RegistryClient::Options WithCaFile(RegistryClient::Options options) {
  std::string& file = options.settings.ca_file;
  if (file.empty()) file = FindCaFile(options.host, CertificateDirectories());
  return options;
}

std::string Scope(const RegistryClient::Options& options) {
  return fmt::format("repository:{}:pull{}", options.repository,
                     options.access == Access::kPush ? ",push" : "");
}

absl::Status CheckDigest(std::string_view content, const Digest& expected) {
  const Digest actual = Digest::Of(AsBytes(content));
  if (actual == expected) return absl::OkStatus();
  return absl::DataLossError(fmt::format("digest mismatch: {} was expected, the content has {}",
                                         expected.ToString(), actual.ToString()));
}

std::string MediaType(const http::Response& response) {
  const std::string type = response.Header("content-type");
  return type.substr(0, type.find_first_of("; "));
}

bool IsManifestType(std::string_view type) {
  return std::ranges::find(kManifestTypes, type) != kManifestTypes.end();
}

// Whether it is a manifest or index at all, by the server's word or its own: between us and a mirror
// there may be a page that wants a log-in, and says 200.
absl::Status CheckIsManifest(const Document& document) {
  ASSIGN_OR_RETURN(const nlohmann::json value, oci::ParseJson(document.content, "answer"));
  const oci::Field field(value, "answer");
  ASSIGN_OR_RETURN(const oci::Field version, field.Get("schemaVersion"));
  ASSIGN_OR_RETURN(const uint64_t number, version.Size());
  if (number != 2) return version.Error(fmt::format("{}, not 2", number));
  ASSIGN_OR_RETURN(const std::string type, field.OptionalString("mediaType"));
  if (IsManifestType(document.media_type) || IsManifestType(type)) return absl::OkStatus();
  return field.Error(fmt::format("it is a '{}'", document.media_type));
}

// What is behind the host of a URL.
std::string_view PathOf(const http::Url& url) {
  const std::string_view text = url.text;
  return text.substr(std::min(text.find('/', text.find("://") + 3), text.size()));
}

}  // namespace

RegistryClient::RegistryClient(Options options)
    : options_(WithCaFile(std::move(options))),
      name_(NameOf(options_)),
      tokens_({.client = options_.client,
               .host = options_.host,
               .repository = options_.repository,
               .scope = Scope(options_),
               .settings = options_.settings,
               .allow_http = AllowsHttp(),
               .anonymous = is_mirror()}) {}

bool RegistryClient::AllowsHttp() const {
  // A mirror's URL says what it is.
  if (is_mirror()) return options_.mirror_url.starts_with("http:");
  return options_.settings.plain_http || http::IsLoopback(WithoutPort(options_.host));
}

absl::Status RegistryClient::Heed(http::Request* request) const {
  request->not_before = BusyUntil();
  const auto left = std::chrono::ceil<std::chrono::seconds>(request->not_before - Clock::now());
  const auto waits = is_mirror() ? std::chrono::seconds(0) : http::kMaxRetryAfter;
  if (left > waits) {
    return absl::UnavailableError(fmt::format(
        "the server is busy and asked for a pause (Retry-After), which lasts for {} s more",
        left.count()));
  }
  request->busy = [until = busy_until_](std::chrono::seconds pause) {
    *until = (Clock::now() + std::min(pause, kMaxPause)).time_since_epoch();
  };
  return absl::OkStatus();
}

absl::StatusOr<std::string> RegistryClient::Base() {
  const std::lock_guard lock(mutex_);
  if (base_.empty()) {
    ASSIGN_OR_RETURN(base_, FindBase());
  }
  return base_;
}

absl::StatusOr<std::string> RegistryClient::FindBase() {
  const auto base = [this](std::string_view root) {
    return fmt::format("{}/{}/", root, options_.repository);
  };
  if (is_mirror()) {
    const size_t host = options_.mirror_url.find("//") + 2;
    const bool has_path = options_.mirror_url.find('/', host) != std::string::npos;
    return base(options_.mirror_url + (has_path ? "" : "/v2"));
  }
  const std::string host = ApiHost(options_.host);
  const std::string https = fmt::format("https://{}/v2", host);
  const std::string http = fmt::format("http://{}/v2", host);
  if (options_.settings.plain_http) return base(http);
  if (!AllowsHttp() || !options_.settings.ca_file.empty()) return base(https);
  // A loopback address without TLS is fine, but whether that is how it is has to be tried. Only a
  // server that does not speak TLS at all is asked without: a wrong certificate stays an error.
  const absl::StatusOr<http::Response> probe = options_.client->Perform(
      {.url = https + "/", .ca_file = options_.settings.ca_file, .attempts = 1});
  if (probe.ok()) return base(https);
  if (probe.status().GetPayload(http::kNoTlsPayload)) return base(http);
  return Name(probe.status());
}

absl::StatusOr<std::string> RegistryClient::UrlOf(std::string_view path) {
  ASSIGN_OR_RETURN(std::string url, Base());
  url += path;
  // Mirrors for several registries are told which one is meant, as containerd does.
  if (is_mirror()) {
    const char* separator = url.find('?') == std::string::npos ? "?" : "&";
    url += fmt::format("{}ns={}", separator, http::Escape(options_.host));
  }
  return url;
}

absl::StatusOr<http::Response> RegistryClient::Authorized(http::Request request) {
  request.allow_http = AllowsHttp();
  request.ca_file = options_.settings.ca_file;
  if (is_mirror()) request.attempts = 1;  // there is another server behind it
  ASSIGN_OR_RETURN(const bool is_ours, IsOurs(request.url));
  for (int challenges = 0;; ++challenges) {
    RETURN_IF_ERROR(Heed(&request));
    if (is_ours) {
      ASSIGN_OR_RETURN(request.authorization, tokens_.Authorization());
    }
    ASSIGN_OR_RETURN(http::Response response, options_.client->Perform(request));
    if (response.status != 401 || challenges == kMaxChallenges) return response;
    ASSIGN_OR_RETURN(const bool answered, Answer(response, request.authorization));
    if (!answered) return response;
  }
}

absl::StatusOr<bool> RegistryClient::IsOurs(const std::string& url) {
  ASSIGN_OR_RETURN(const std::string base, Base());
  ASSIGN_OR_RETURN(const http::Url ours, http::Url::Parse(base));
  ASSIGN_OR_RETURN(const http::Url theirs, http::Url::Parse(url));
  return ours.SameOrigin(theirs);
}

absl::StatusOr<bool> RegistryClient::Answer(const http::Response& response,
                                            const std::string& authorization) {
  if (response.status != 401) return false;
  // Where a redirect has led, credentials of this server are of no use and none of their business.
  ASSIGN_OR_RETURN(const bool is_ours, IsOurs(response.url));
  if (!is_ours) return false;
  std::vector<Challenge> challenges;
  const auto [first, last] = response.headers.equal_range("www-authenticate");
  for (auto header = first; header != last; ++header) {
    for (Challenge& challenge : ParseChallenges(header->second)) {
      challenges.push_back(std::move(challenge));
    }
  }
  if (challenges.empty()) return false;
  RETURN_IF_ERROR(tokens_.Renew(challenges, authorization), "{}", name_);
  return true;
}

absl::StatusOr<http::Response> RegistryClient::Send(const std::string& path_or_url,
                                                    http::Request request) {
  const bool is_url = path_or_url.starts_with("http:") || path_or_url.starts_with("https:");
  if (is_url) {
    request.url = path_or_url;
  } else {
    ASSIGN_OR_RETURN(request.url, UrlOf(path_or_url));
  }
  absl::StatusOr<http::Response> response = Authorized(std::move(request));
  if (!response.ok()) return Name(response.status());
  return response;
}

absl::StatusOr<Document> RegistryClient::GetManifest(const std::string& tag_or_digest) {
  ASSIGN_OR_RETURN(
      http::Response response,
      Send("manifests/" + tag_or_digest,
           {.headers = {{"Accept", fmt::format("{}", fmt::join(kManifestTypes, ", "))}},
            .max_body = oci::kMaxDocumentSize}));
  if (!response.ok()) return Name(Annotate(ErrorOf(response), "manifest " + tag_or_digest));
  Document document{.content = std::move(response.body), .media_type = MediaType(response)};
  document.digest = Digest::Of(AsBytes(document.content));
  // A tag's digest is what the server says it is, so this finds no more than damage on the way.
  const bool by_digest = tag_or_digest.starts_with("sha256:");
  const std::string promised = by_digest ? tag_or_digest : response.Header("docker-content-digest");
  if (promised.starts_with("sha256:") && promised != document.digest.ToString()) {
    return Name(absl::DataLossError(
        fmt::format("manifest {}: digest mismatch: {} was expected, the content has {}",
                    tag_or_digest, promised, document.digest.ToString())));
  }
  if (is_mirror() && !by_digest) {
    if (const absl::Status status = CheckIsManifest(document); !status.ok()) {
      return Name(
          absl::DataLossError(fmt::format("manifest {}: the answer is neither a manifest nor "
                                          "an index: {}",
                                          tag_or_digest, std::string(status.message()))));
    }
  }
  return document;
}

absl::StatusOr<bool> RegistryClient::HasManifest(const std::string& tag_or_digest) {
  ASSIGN_OR_RETURN(
      const http::Response response,
      Send("manifests/" + tag_or_digest,
           {.method = "HEAD",
            .headers = {{"Accept", fmt::format("{}", fmt::join(kManifestTypes, ", "))}}}));
  if (response.status == 404) return false;
  if (!response.ok()) return Name(Annotate(ErrorOf(response), "manifest " + tag_or_digest));
  return true;
}

absl::StatusOr<bool> RegistryClient::PutManifest(const std::string& tag_or_digest,
                                                 std::string_view media_type, std::string content) {
  const Digest digest = Digest::Of(AsBytes(content));
  ASSIGN_OR_RETURN(const http::Response response,
                   Send("manifests/" + tag_or_digest,
                        {.method = "PUT",
                         .headers = {{"Content-Type", std::string(media_type)}},
                         .body = std::make_shared<const std::string>(std::move(content))}));
  if (!response.ok()) return Name(Annotate(ErrorOf(response), "put manifest " + tag_or_digest));
  const std::string stored = response.Header("docker-content-digest");
  if (stored.starts_with("sha256:") && stored != digest.ToString()) {
    return Name(absl::DataLossError(fmt::format("put manifest {}: the server says it is {}, not {}",
                                                tag_or_digest, stored, digest.ToString())));
  }
  return !response.Header("oci-subject").empty();
}

absl::StatusOr<std::string> RegistryClient::NextPage(const http::Response& response) {
  std::string link;
  const auto [first, last] = response.headers.equal_range("link");
  for (auto header = first; header != last && link.empty(); ++header) {
    link = NextLink(header->second);
  }
  if (link.empty()) return link;
  ASSIGN_OR_RETURN(const std::string base, Base());
  ASSIGN_OR_RETURN(const http::Url ours, http::Url::Parse(base));
  ASSIGN_OR_RETURN(const http::Url from, http::Url::Parse(response.url));
  ASSIGN_OR_RETURN(const http::Url next, from.Resolve(link));
  // Only the path counts, as it does for other clients: a server behind a proxy may be wrong about
  // its own scheme and host, and no other one is to be asked.
  const std::string_view path = PathOf(next);
  if (!path.starts_with(PathOf(ours))) {
    return absl::FailedPreconditionError(
        fmt::format("'{}' leads out of the repository", next.text.substr(0, 500)));
  }
  const size_t host_size = ours.text.size() - PathOf(ours).size();
  return ours.text.substr(0, host_size) + std::string(path);
}

absl::Status RegistryClient::GetPages(
    const std::string& path, std::string_view accept, std::string_view what,
    const std::function<absl::StatusOr<bool>(const http::Response&)>& take) {
  uint64_t left = oci::kMaxDocumentSize;
  std::string place = path;
  for (int page = 0; page < kMaxPages; ++page) {
    const auto annotated = [&](const absl::Status& status) {
      if (page == 0) return Name(Annotate(status, what));
      return Name(absl::UnavailableError(
          fmt::format("{}: page {}: {}", what, page + 1, std::string(status.message()))));
    };
    const absl::StatusOr<http::Response> response =
        Send(place, {.headers = {{"Accept", std::string(accept)}}, .max_body = left});
    if (!response.ok()) return page == 0 ? response.status() : annotated(response.status());
    if (!response->ok()) return annotated(ErrorOf(*response));
    left -= response->body.size();
    const absl::StatusOr<bool> wants_more = take(*response);
    if (!wants_more.ok()) return annotated(wants_more.status());
    if (!*wants_more) return absl::OkStatus();
    absl::StatusOr<std::string> next = NextPage(*response);
    if (!next.ok()) {
      return Name(absl::UnavailableError(
          fmt::format("{}: next page: {}", what, std::string(next.status().message()))));
    }
    if (next->empty()) return absl::OkStatus();
    place = *std::move(next);
  }
  return Name(absl::ResourceExhaustedError(fmt::format("{}: more than {} pages", what, kMaxPages)));
}

absl::StatusOr<std::vector<std::string>> RegistryClient::GetReferrers(
    const Digest& digest, std::string_view artifact_type) {
  std::vector<std::string> pages;
  RETURN_IF_ERROR(GetPages(
      fmt::format("referrers/{}?artifactType={}", digest.ToString(), http::Escape(artifact_type)),
      kIndexType, "referrers of " + digest.ToString(),
      [&](const http::Response& response) -> absl::StatusOr<bool> {
        // A server without the API may answer with anything, a page for people for example.
        if (MediaType(response) != kIndexType) {
          return absl::NotFoundError("no referrers API: the answer is no index");
        }
        pages.push_back(response.body);
        return true;
      }));
  return pages;
}

absl::StatusOr<std::vector<std::string>> RegistryClient::ListTags(size_t limit) {
  std::vector<std::string> tags;
  RETURN_IF_ERROR(GetPages(
      fmt::format("tags/list?n={}", limit), "application/json", "list tags",
      [&](const http::Response& response) -> absl::StatusOr<bool> {
        ASSIGN_OR_RETURN(const nlohmann::json value, oci::ParseJson(response.body, "list of tags"));
        ASSIGN_OR_RETURN(const std::vector<std::string> page,
                         oci::Field(value, "list of tags").OptionalStrings("tags"));
        for (const std::string& tag : page) {
          if (tags.size() < limit && IsTag(tag)) tags.push_back(tag);
        }
        return tags.size() < limit;
      }));
  return tags;
}

absl::StatusOr<std::string> RegistryClient::GetBlob(const Digest& digest, uint64_t size) {
  ASSIGN_OR_RETURN(http::Response response, Send("blobs/" + digest.ToString(), {.max_body = size}));
  const std::string what = "blob " + digest.ToString();
  if (!response.ok()) return Name(Annotate(ErrorOf(response), what));
  RETURN_IF_ERROR(CheckDigest(response.body, digest), "{}: {}", name_, what);
  return std::move(response.body);
}

absl::StatusOr<uint64_t> RegistryClient::BlobSize(const Digest& digest) {
  ASSIGN_OR_RETURN(const http::Response response,
                   Send("blobs/" + digest.ToString(), {.method = "HEAD"}));
  if (!response.ok()) return Name(Annotate(ErrorOf(response), "blob " + digest.ToString()));
  const std::string text = response.Header("content-length");
  uint64_t size = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  const bool is_number = !text.empty() && error == std::errc() && end == text.data() + text.size();
  return is_number ? size : kUnknownSize;
}

absl::StatusOr<bool> RegistryClient::MountBlob(const Digest& digest,
                                               const std::string& from_repository) {
  ASSIGN_OR_RETURN(const http::Response response,
                   Send(fmt::format("blobs/uploads/?mount={}&from={}", digest.ToString(),
                                    http::Escape(from_repository)),
                        {.method = "POST", .attempts = 1}));
  // Where it cannot be done, an upload has begun instead, which is not wanted.
  if (response.status == 202) {
    ASSIGN_OR_RETURN(const http::Url from, http::Url::Parse(response.url));
    const absl::StatusOr<http::Url> upload = from.Resolve(response.Header("location"));
    if (upload.ok()) {
      Send(upload->text, {.method = "DELETE", .attempts = 1}).status().IgnoreError();
    }
  }
  return response.status == 201;
}

absl::StatusOr<http::Request> RegistryClient::RangeRequest(const Digest& digest,
                                                           const http::Range& range) {
  http::Request request{
      .range = range, .allow_http = AllowsHttp(), .ca_file = options_.settings.ca_file};
  if (absl::Status status = Heed(&request); !status.ok()) return Name(std::move(status));
  ASSIGN_OR_RETURN(request.url, UrlOf("blobs/" + digest.ToString()));
  ASSIGN_OR_RETURN(request.authorization, tokens_.Authorization());
  if (is_mirror()) request.attempts = 1;  // there is another server behind it
  return request;
}

}  // namespace lamina::registry
