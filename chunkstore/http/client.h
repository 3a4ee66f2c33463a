// SPDX-License-Identifier: Apache-2.0
//
// An HTTP client for fetching parts of large objects from servers that are busy, far away, or wrong.
// One event thread runs all requests (libcurl's multi interface) over connections that are kept alive,
// HTTP/2 where the server offers it. It follows redirects itself, repeats what failed for a passing
// reason, and hands out nothing but complete bodies of bounded size, or the parts of one in order as
// they come.
//
// Rules that hold for every request:
//   - `authorization` goes to the scheme, host and port of the request's own URL, and nowhere else.
//   - https is never left for http, whoever asks for it.
//   - http is used only if the request allows it, or for a loopback address.
//   - Certificates are checked, against the system's authorities and `ca_file`.
#ifndef LAMINA_CHUNKSTORE_HTTP_CLIENT_H_
#define LAMINA_CHUNKSTORE_HTTP_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::http {

// A part of an object whose size is known.
struct Range {
  uint64_t offset = 0;
  uint64_t length = 0;  // not 0
  uint64_t object_size = 0;
};

struct Request {
  std::string method = "GET";
  std::string url;
  std::vector<std::pair<std::string, std::string>> headers;
  std::string authorization;                // value of the header of that name; empty: none
  std::shared_ptr<const std::string> body;  // of POST, PUT and PATCH; null: none

  // With a range, a successful response's body is exactly these bytes. Servers that ignore the range
  // and send the whole object are read up to its end, if not too much of it lies before the range.
  std::optional<Range> range;
  // With a range: takes the body piece by piece, each byte once, whatever it took to get it, instead
  // of Response::body. Called on the event thread, which it must not block. False asks for a break:
  // what has been read already may still come, and nothing else before Client::Resume.
  std::function<bool(std::string_view)> sink;
  uint64_t max_body = 8 << 20;  // of other responses

  bool allow_http = false;
  std::string ca_file;  // PEM; beside the system's authorities
  bool follow_redirects = true;
  // Not over a connection that is there, which may be why another request does not come to an end.
  bool fresh_connection = false;
  // Tries in all, for what may pass: lost connections, 429 and 5xx. Requests that may not be sent
  // twice have 1. With a range, one that brought something begins the count anew.
  int attempts = 5;
  std::chrono::seconds stall_timeout{0};  // 0: the client's
  // The first try begins then, if that is later than now.
  std::chrono::steady_clock::time_point not_before{};
  // Told of the pause that a 429 or 503 asks for (Retry-After), of each that comes. Called on the
  // event thread, which it must not block. May be null.
  std::function<void(std::chrono::seconds)> busy;
};

struct Response {
  int status = 0;
  std::string url;                                  // the one that answered, after redirects
  std::multimap<std::string, std::string> headers;  // names in lower case
  std::string body;

  // The first header of that name (in lower case); empty if there is none.
  std::string Header(std::string_view name) const;
  bool ok() const { return status >= 200 && status < 300; }
};

// Errors with this payload say that the server at the other end of the connection does not speak TLS.
inline constexpr const char* kNoTlsPayload = "lamina.http/no-tls";

inline constexpr std::chrono::seconds kMaxRetryAfter{30};

struct ClientOptions {
  std::chrono::milliseconds connect_timeout{10'000};  // name look-up and TLS included
  // A transfer that moves less than `min_speed` bytes a second for this long has failed.
  std::chrono::seconds stall_timeout{30};
  int min_speed = 1024;
  // One that is faster than that has failed nevertheless after this long and as long as its bytes
  // take at `slowest`: a server may go on sending for ever.
  std::chrono::seconds patience{60};
  int slowest = 16 << 10;  // bytes a second
  // Requests; others wait for their turn. More than servers that do not answer may hold.
  int max_in_flight = 512;
  int max_connections = 64;  // that are kept
  int max_connections_per_host = 16;
  // Pauses between attempts: a random part, at least half, of first_backoff * 2^n, up to max_backoff.
  std::chrono::milliseconds first_backoff{100};
  std::chrono::milliseconds max_backoff{5'000};
  // A server that asks for a longer pause (Retry-After) is not waited for.
  std::chrono::seconds max_retry_after = kMaxRetryAfter;
};

// Thread-safe.
class Client {
 public:
  static absl::StatusOr<std::shared_ptr<Client>> Create(const ClientOptions& options = {});
  // Requests that run fail with kCancelled.
  virtual ~Client() = default;

  // Called once, on the event thread, which it must not block. Any response of a server is a result,
  // whatever its status. Errors: kUnavailable if there was no complete response, or none from a server
  // that can be trusted; kDataLoss if what came is not the range that was asked for;
  // kResourceExhausted for bodies and headers that are too large; kInvalidArgument and
  // kFailedPrecondition for URLs and redirects that are refused; kCancelled.
  using Done = std::function<void(absl::StatusOr<Response>)>;
  virtual uint64_t Start(Request request, Done done) = 0;
  // The request's `done` is called soon, with kCancelled if the response is not complete by then.
  virtual void Cancel(uint64_t id) = 0;
  // Goes on with a request whose sink wanted a break.
  virtual void Resume(uint64_t id) = 0;

  // Requests that run, and all that are started from now on, fail with kCancelled: for whoever ends
  // and would have to wait for servers that do not answer.
  virtual void Stop() = 0;

  // Start, and wait.
  absl::StatusOr<Response> Perform(Request request);
};

// The pause that a Retry-After header asks for: seconds, or a date, which is relative to `now`.
std::optional<std::chrono::seconds> ParseRetryAfter(std::string_view value,
                                                    std::chrono::system_clock::time_point now);

// "bytes 0-99/1234" (RFC 9110, section 14.4); nothing if it is malformed.
struct ContentRange {
  uint64_t first = 0;
  uint64_t last = 0;
  std::optional<uint64_t> size;  // "*": not known
};
std::optional<ContentRange> ParseContentRange(std::string_view value);

}  // namespace lamina::http

#endif  // LAMINA_CHUNKSTORE_HTTP_CLIENT_H_
