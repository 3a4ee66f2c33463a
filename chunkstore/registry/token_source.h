// SPDX-License-Identifier: Apache-2.0
//
// What to put into the Authorization header of requests to one repository of one server: found out
// from the server's challenges, got from its token server (distribution's "Token Authentication" and
// "OAuth2 Token Authentication"), kept, and renewed in time.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_TOKEN_SOURCE_H_
#define LAMINA_CHUNKSTORE_REGISTRY_TOKEN_SOURCE_H_

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/http/client.h"
#include "chunkstore/registry/challenge.h"
#include "chunkstore/registry/settings.h"

namespace lamina::registry {

// Thread-safe. However many threads need a new token, one request gets it for all; if it fails, all of
// them fail with its error, and the next caller tries again.
class TokenSource {
 public:
  struct Options {
    std::shared_ptr<http::Client> client;
    std::string host;  // as credentials name the registry
    std::string repository;
    std::string scope;  // "repository:NAME:pull"
    Settings settings;
    bool allow_http =
        false;               // of the server itself; its token server may then be asked by http too
    bool anonymous = false;  // mirrors never see a registry's credentials
  };
  explicit TokenSource(Options options);

  // The header's value for a request that starts now; empty as long as the server has not asked for
  // anything. A token that is about to expire is renewed first, by one of the callers.
  absl::StatusOr<std::string> Authorization();

  // To be called when the server has answered 401 to a request that had `used` as its header. On
  // success Authorization() gives something else. kUnauthenticated, saying what to do, if there is
  // nothing else to give.
  absl::Status Renew(const std::vector<Challenge>& challenges, const std::string& used);

 private:
  using Clock = std::chrono::steady_clock;
  struct Grant {
    std::string header;
    Clock::time_point refresh_at = Clock::time_point::max();
    Clock::time_point expires_at = Clock::time_point::max();
  };

  // Gets a new grant, or waits for the one who does. `lock` is of mutex_.
  absl::Status RenewLocked(std::unique_lock<std::mutex>& lock);
  absl::StatusOr<Grant> Request(const Challenge& challenge, const std::set<std::string>& scopes);
  absl::StatusOr<Grant> RequestToken(const Challenge& challenge,
                                     const std::set<std::string>& scopes,
                                     const std::optional<Credential>& credential);
  absl::StatusOr<std::optional<Credential>> FindCredential() const;

  const Options options_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Challenge challenge_;  // the last one; without scheme before there was one
  std::set<std::string> scopes_;
  Grant grant_;
  bool renewing_ = false;
  absl::Status renewal_;  // how the last one ended
};

// A token server's answer: the token and how long it is good for.
struct TokenAnswer {
  std::string token;
  std::chrono::seconds lifetime{60};  // what the specification has where the server says nothing
};
absl::StatusOr<TokenAnswer> ParseTokenAnswer(std::string_view json);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_TOKEN_SOURCE_H_
