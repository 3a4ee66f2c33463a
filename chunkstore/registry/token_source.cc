// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/token_source.h"

#include <algorithm>
#include <utility>

#include "chunkstore/base/json.h"
#include "chunkstore/http/url.h"
#include "chunkstore/registry/errors.h"

namespace lamina::registry {
namespace {

constexpr uint64_t kMaxAnswer = 1 << 20;
constexpr auto kMaxLifetime = std::chrono::hours(24);
// A token is renewed when this much of its life is left, or a quarter of it if that is less.
constexpr auto kMaxMargin = std::chrono::seconds(20);

bool IsHeaderText(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c > ' ' && c < 127; });
}

std::string FormEncoded(const std::vector<std::pair<std::string, std::string>>& fields) {
  std::string text;
  for (const auto& [name, value] : fields) {
    text += fmt::format("{}{}={}", text.empty() ? "" : "&", name, http::Escape(value));
  }
  return text;
}

}  // namespace

absl::StatusOr<TokenAnswer> ParseTokenAnswer(std::string_view json) {
  // Errors do not repeat the text, which has a secret in it.
  const absl::StatusOr<nlohmann::json> value = oci::ParseJson(json, "token");
  if (!value.ok()) return absl::InvalidArgumentError("the answer is not the JSON it should be");
  const oci::Field field(*value, "token answer");
  TokenAnswer answer;
  ASSIGN_OR_RETURN(answer.token, field.OptionalString("token"));
  if (answer.token.empty()) {
    ASSIGN_OR_RETURN(answer.token, field.OptionalString("access_token"));
  }
  if (answer.token.empty() || !IsHeaderText(answer.token)) {
    return absl::InvalidArgumentError("the answer has no token that could be used");
  }
  ASSIGN_OR_RETURN(const std::optional<oci::Field> lifetime, field.Find("expires_in"));
  if (lifetime) {
    ASSIGN_OR_RETURN(const uint64_t seconds, lifetime->Size());
    answer.lifetime = std::chrono::seconds(
        std::min<uint64_t>(seconds, std::chrono::seconds(kMaxLifetime).count()));
  }
  return answer;
}

TokenSource::TokenSource(Options options) : options_(std::move(options)), scopes_{options_.scope} {}

absl::StatusOr<std::string> TokenSource::Authorization() {
  std::unique_lock lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (now >= grant_.refresh_at) {
    // While one renews it, the others use it to its end.
    const bool usable = now < grant_.expires_at;
    if (!usable || !renewing_) {
      const absl::Status status = RenewLocked(lock);
      if (!status.ok() && !usable) return status;
    }
  }
  return grant_.header;
}

absl::Status TokenSource::Renew(const std::vector<Challenge>& challenges, const std::string& used) {
  const Challenge* challenge = FindUsable(challenges);
  if (challenge == nullptr) {
    return absl::UnauthenticatedError(
        "the server wants authentication of a kind that is not known "
        "here (neither Basic nor Bearer with a realm)");
  }
  std::unique_lock lock(mutex_);
  if (grant_.header != used) return absl::OkStatus();  // another thread was faster
  challenge_ = *challenge;
  const std::string scope = challenge->Parameter("scope");
  for (std::string_view scopes = scope; !scopes.empty();) {
    const size_t space = std::min(scopes.find(' '), scopes.size());
    if (space > 0) scopes_.emplace(scopes.substr(0, space));
    scopes.remove_prefix(std::min(space + 1, scopes.size()));
  }
  RETURN_IF_ERROR(RenewLocked(lock));
  if (grant_.header != used) return absl::OkStatus();
  return absl::UnauthenticatedError("the server refuses the credentials");
}

absl::Status TokenSource::RenewLocked(std::unique_lock<std::mutex>& lock) {
  if (renewing_) {
    changed_.wait(lock, [this] { return !renewing_; });
    return renewal_;
  }
  renewing_ = true;
  const Challenge challenge = challenge_;
  const std::set<std::string> scopes = scopes_;
  lock.unlock();
  absl::StatusOr<Grant> grant = Request(challenge, scopes);
  lock.lock();
  renewing_ = false;
  renewal_ = grant.status();
  if (grant.ok()) grant_ = *std::move(grant);
  changed_.notify_all();
  return renewal_;
}

absl::StatusOr<std::optional<Credential>> TokenSource::FindCredential() const {
  if (options_.anonymous) return std::optional<Credential>();
  return registry::FindCredential(options_.settings.credentials, options_.host,
                                  options_.repository);
}

absl::StatusOr<TokenSource::Grant> TokenSource::Request(const Challenge& challenge,
                                                        const std::set<std::string>& scopes) {
  ASSIGN_OR_RETURN(const std::optional<Credential> credential, FindCredential());
  if (challenge.scheme == "bearer") return RequestToken(challenge, scopes, credential);
  if (!credential || credential->username.empty()) {
    return absl::UnauthenticatedError(
        fmt::format("{} wants a user name and a password, and none were found: log in with 'docker "
                    "login' or 'podman login', or give --creds",
                    options_.host));
  }
  return Grant{.header = credential->Basic()};
}

absl::StatusOr<TokenSource::Grant> TokenSource::RequestToken(
    const Challenge& challenge, const std::set<std::string>& scopes,
    const std::optional<Credential>& credential) {
  const std::string realm = challenge.Parameter("realm");
  ASSIGN_OR_RETURN(const http::Url url, http::Url::Parse(realm), "token server");
  if (!url.is_https() && !options_.allow_http) {
    return absl::FailedPreconditionError(
        fmt::format("token server {}: http is refused for a registry with https", url.host));
  }
  std::vector<std::pair<std::string, std::string>> fields;
  const std::string service = challenge.Parameter("service");
  if (!service.empty()) fields.emplace_back("service", service);
  http::Request request{.max_body = kMaxAnswer,
                        .allow_http = options_.allow_http,
                        .ca_file = options_.settings.ca_file};
  if (credential && !credential->identity_token.empty()) {
    std::string all;
    for (const std::string& scope : scopes) all += (all.empty() ? "" : " ") + scope;
    fields.emplace_back("grant_type", "refresh_token");
    fields.emplace_back("client_id", "lamina");
    fields.emplace_back("scope", all);
    fields.emplace_back("refresh_token", credential->identity_token);
    request.method = "POST";
    // It would carry the refresh token wherever it leads.
    request.follow_redirects = false;
    request.url = url.text;
    request.headers = {{"Content-Type", "application/x-www-form-urlencoded"}};
    request.body = std::make_shared<const std::string>(FormEncoded(fields));
  } else {
    for (const std::string& scope : scopes) fields.emplace_back("scope", scope);
    const char* separator = url.text.find('?') == std::string::npos ? "?" : "&";
    request.url = url.text + separator + FormEncoded(fields);
    if (credential) request.authorization = credential->Basic();
  }
  const Clock::time_point asked_at = Clock::now();
  ASSIGN_OR_RETURN(const http::Response response, options_.client->Perform(std::move(request)),
                   "get a token for {}", options_.host);
  if (!response.ok()) {
    absl::Status status = ErrorOf(response);
    if (response.status == 401 || response.status == 403) {
      status = absl::UnauthenticatedError(fmt::format(
          "{} ({})",
          credential ? "the credentials are refused" : "access without credentials is refused",
          std::string(status.message())));
    }
    return Annotate(std::move(status),
                    fmt::format("get a token for {} from {}", options_.host, url.host));
  }
  ASSIGN_OR_RETURN(const TokenAnswer answer, ParseTokenAnswer(response.body), "token server {}",
                   url.host);
  const Clock::duration lifetime = answer.lifetime;
  return Grant{
      .header = "Bearer " + answer.token,
      .refresh_at = asked_at + lifetime - std::min<Clock::duration>(kMaxMargin, lifetime / 4),
      .expires_at = asked_at + lifetime};
}

}  // namespace lamina::registry
