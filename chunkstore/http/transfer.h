// SPDX-License-Identifier: Apache-2.0
//
// One request on its way through redirects and repetitions: makes each try's libcurl handle, takes in
// what the server sends, and says what comes next. Only the client's event thread uses it.
#ifndef LAMINA_CHUNKSTORE_HTTP_TRANSFER_H_
#define LAMINA_CHUNKSTORE_HTTP_TRANSFER_H_

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "chunkstore/http/client.h"
#include "chunkstore/http/curl_library.h"
#include "chunkstore/http/url.h"

namespace lamina::http {

class Transfer {
 public:
  Transfer(Request request, const ClientOptions& options, Client::Done done);

  // A handle for the next try, ready to be added to a multi handle. It belongs to the transfer.
  absl::StatusOr<CURL*> Begin();

  // What to do after a try that ended with `code`.
  struct Verdict {
    // Nothing: try again after `pause`.
    std::optional<absl::StatusOr<Response>> result;
    std::chrono::milliseconds pause{0};
  };
  // `jitter` is a random number from 0 to 1. Frees the handle.
  Verdict End(CURLcode code, double jitter);

  void Finish(absl::StatusOr<Response> result) { done_(std::move(result)); }
  CURL* handle() const { return handle_.get(); }
  std::chrono::steady_clock::time_point not_before() const { return request_.not_before; }

 private:
  struct FreeHandle {
    void operator()(CURL* handle) const { Curl().easy_cleanup(handle); }
  };
  struct FreeList {
    void operator()(curl_slist* list) const { Curl().slist_free_all(list); }
  };

  absl::Status CheckScheme(const Url& url) const;
  // How long this try may take in all.
  std::chrono::seconds TimeLimit() const;
  std::chrono::seconds StallTimeout() const;
  void SetOptions();
  void SetHeaders();
  void SetBody();

  static size_t OnHeader(char* data, size_t one, size_t size, void* self);
  static size_t OnBody(char* data, size_t one, size_t size, void* self);
  absl::Status AddHeader(std::string_view line);
  absl::Status AddBody(std::string_view data);
  // Looks at status and headers once they are complete: what of the body is the range?
  absl::Status BeginRange();
  absl::Status AddToRange(std::string_view data);
  // Whether the server, having sent the range, goes on with what lies behind it.
  bool MoreFollows() const;
  bool RangeIsComplete() const { return received_ == request_.range->length; }
  // Whether this try has brought something worth mentioning.
  bool HasProgress() const;

  Verdict JudgeResponse(double jitter);
  std::optional<Verdict> Redirect();
  Verdict Retry(absl::Status why, double jitter, std::optional<std::chrono::seconds> asked = {});
  Verdict RetryOrGiveResponse(double jitter);
  Verdict Fail(const absl::Status& status) const;
  // "GET https://host/path", for errors: without the query, which may be a signature.
  std::string Name() const;

  const Request request_;
  const ClientOptions& options_;
  const Client::Done done_;

  int tries_ = 0;
  bool timed_out_ = false;   // the last try
  bool over_limit_ = false;  // it took longer than it may
  int redirects_ = 0;
  std::optional<Url> first_url_;
  std::optional<Url> url_;  // of this try

  std::unique_ptr<CURL, FreeHandle> handle_;
  std::unique_ptr<curl_slist, FreeList> headers_;
  std::array<char, CURL_ERROR_SIZE> error_{};
  Response response_;
  size_t header_bytes_ = 0;
  bool headers_complete_ = false;
  std::chrono::steady_clock::time_point ends_at_;  // by the time limit
  absl::Status failure_;                           // found while the response came in

  uint64_t received_ = 0;  // bytes of the range, kept from one try to the next
  std::string range_;      // these bytes, unless there is a sink
  bool range_begun_ = false;
  uint64_t skip_ = 0;             // bytes of the body that lie before what is wanted
  uint64_t received_before_ = 0;  // received_ when this try began
};

}  // namespace lamina::http

#endif  // LAMINA_CHUNKSTORE_HTTP_TRANSFER_H_
