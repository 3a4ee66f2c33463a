// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/http/transfer.h"

#include <absl/strings/cord.h>

#include <algorithm>
#include <charconv>
#include <utility>

namespace lamina::http {
namespace {

constexpr int kMaxRedirects = 5;
constexpr size_t kMaxHeaderBytes = 256 << 10;
// Of a response that is an error: enough for what a server has to say.
constexpr size_t kMaxErrorBody = 64 << 10;
// What may be read in vain from a server that ignores ranges. More would turn the reading of a large
// object, piece by piece, into something quadratic.
constexpr uint64_t kMaxSkip = 64 << 20;
// A try that brings this much is not a failed one.
constexpr uint64_t kMinProgress = 64 << 10;
// What is read from a connection at once when a sink takes it.
constexpr long kStreamBuffer = 256 << 10;

bool IsRedirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

bool MayPass(int status) {
  return status == 408 || status == 429 || status == 500 || status == 502 || status == 503 ||
         status == 504;
}

bool MayPass(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_SSL_CONNECT_ERROR:  // reset in the handshake; a bad certificate is another code
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_PARTIAL_FILE:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
      return true;
    default:
      return false;
  }
}

std::string_view Trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

std::optional<uint64_t> ContentLength(const Response& response) {
  const std::string text = response.Header("content-length");
  uint64_t length = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return length;
}

}  // namespace

Transfer::Transfer(Request request, const ClientOptions& options, Client::Done done)
    : request_(std::move(request)), options_(options), done_(std::move(done)) {}

std::string Transfer::Name() const {
  const std::string& url = url_ ? url_->text : request_.url;
  return fmt::format("{} {}", request_.method, url.substr(0, url.find('?')));
}

absl::Status Transfer::CheckScheme(const Url& url) const {
  if (url.is_https() || request_.allow_http || IsLoopback(url.host)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      fmt::format("{}: http is refused (it is not encrypted) unless it is asked for", url.host));
}

absl::StatusOr<CURL*> Transfer::Begin() {
  if (!first_url_) {
    ASSIGN_OR_RETURN(first_url_, Url::Parse(request_.url));
    url_ = first_url_;
  }
  RETURN_IF_ERROR(CheckScheme(*url_));
  response_ = {};
  header_bytes_ = 0;
  headers_complete_ = false;
  failure_ = absl::OkStatus();
  range_begun_ = false;
  skip_ = 0;
  received_before_ = received_;
  error_[0] = '\0';
  handle_.reset(Curl().easy_init());
  if (handle_ == nullptr) return absl::ResourceExhaustedError("no memory for an HTTP request");
  SetOptions();
  SetHeaders();
  SetBody();
  return handle_.get();
}

std::chrono::seconds Transfer::TimeLimit() const {
  // Of a body whose length is not known, the server may send that much.
  uint64_t bytes = request_.range ? request_.range->length - received_ : request_.max_body;
  if (request_.body != nullptr) bytes += request_.body->size();
  const auto slowest = static_cast<uint64_t>(options_.slowest);
  return std::max(options_.patience, 2 * StallTimeout()) + std::chrono::seconds(bytes / slowest);
}

std::chrono::seconds Transfer::StallTimeout() const {
  return request_.stall_timeout.count() > 0 ? request_.stall_timeout : options_.stall_timeout;
}

void Transfer::SetOptions() {
  CURL* const handle = handle_.get();
  const auto set = [handle](CURLoption option, auto value) {
    Curl().easy_setopt(handle, option, value);
  };
  set(CURLOPT_URL, url_->text.c_str());
  set(CURLOPT_PROTOCOLS_STR, url_->scheme.c_str());
  set(CURLOPT_PRIVATE, static_cast<void*>(this));
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_ERRORBUFFER, error_.data());
  set(CURLOPT_FOLLOWLOCATION, 0L);
  if (request_.sink) {
    // A connection of its own: on a shared one (HTTP/2) a break would hold up others as well.
    set(CURLOPT_HTTP_VERSION, long{CURL_HTTP_VERSION_1_1});
    set(CURLOPT_BUFFERSIZE, kStreamBuffer);
  } else {
    set(CURLOPT_HTTP_VERSION, long{CURL_HTTP_VERSION_2TLS});
  }
  set(CURLOPT_PIPEWAIT, 1L);  // rather a stream of a connection that is there than a new one
  set(CURLOPT_TCP_KEEPALIVE, 1L);
  // Something may be wrong with the connection on which the last try has timed out (sockets.h).
  set(CURLOPT_FRESH_CONNECT, request_.fresh_connection || timed_out_ ? 1L : 0L);
  set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options_.connect_timeout.count()));
  const std::chrono::seconds limit = TimeLimit();
  ends_at_ = std::chrono::steady_clock::now() + limit;
  set(CURLOPT_TIMEOUT_MS, static_cast<long>(std::chrono::milliseconds(limit).count()));
  set(CURLOPT_LOW_SPEED_TIME, static_cast<long>(StallTimeout().count()));
  set(CURLOPT_LOW_SPEED_LIMIT, static_cast<long>(options_.min_speed));
  // The directory of the system's authorities, which libcurl looks into as well, stays set.
  if (!request_.ca_file.empty()) set(CURLOPT_CAINFO, request_.ca_file.c_str());
  set(CURLOPT_HEADERFUNCTION, &Transfer::OnHeader);
  set(CURLOPT_HEADERDATA, static_cast<void*>(this));
  set(CURLOPT_WRITEFUNCTION, &Transfer::OnBody);
  set(CURLOPT_WRITEDATA, static_cast<void*>(this));
}

void Transfer::SetHeaders() {
  curl_slist* list = nullptr;
  const auto add = [&list](const std::string& line) {
    list = Curl().slist_append(list, line.c_str());
  };
  bool has_type = false;
  for (const auto& [name, value] : request_.headers) {
    add(fmt::format("{}: {}", name, value));
    has_type |= Lower(name) == "content-type";
  }
  if (!has_type) add("Content-Type:");  // libcurl would name one for a body
  add("Accept-Encoding: identity");     // a range of something compressed would be of no use
  add("User-Agent: lamina");
  if (!request_.authorization.empty() && url_->SameOrigin(*first_url_)) {
    add("Authorization: " + request_.authorization);
  }
  if (request_.range) {
    add(fmt::format("Range: bytes={}-{}", request_.range->offset + received_,
                    request_.range->offset + request_.range->length - 1));
  }
  headers_.reset(list);
  Curl().easy_setopt(handle_.get(), CURLOPT_HTTPHEADER, headers_.get());
}

void Transfer::SetBody() {
  CURL* const handle = handle_.get();
  if (request_.method == "HEAD") {
    Curl().easy_setopt(handle, CURLOPT_NOBODY, 1L);
  } else if (request_.method != "GET") {
    // POST is how libcurl sends a body from memory; the method's name is then replaced.
    const bool has_body = request_.body != nullptr;
    Curl().easy_setopt(handle, CURLOPT_POST, 1L);
    Curl().easy_setopt(handle, CURLOPT_POSTFIELDS, has_body ? request_.body->data() : "");
    Curl().easy_setopt(handle, CURLOPT_POSTFIELDSIZE_LARGE,
                       static_cast<curl_off_t>(has_body ? request_.body->size() : 0));
    Curl().easy_setopt(handle, CURLOPT_CUSTOMREQUEST, request_.method.c_str());
  }
}

size_t Transfer::OnHeader(char* data, size_t one, size_t size, void* self) {
  auto* transfer = static_cast<Transfer*>(self);
  transfer->failure_ = transfer->AddHeader({data, one * size});
  return transfer->failure_.ok() ? one * size : 0;
}

size_t Transfer::OnBody(char* data, size_t one, size_t size, void* self) {
  auto* transfer = static_cast<Transfer*>(self);
  const auto complete = [transfer] {
    return transfer->request_.range && transfer->range_begun_ && transfer->RangeIsComplete();
  };
  if (complete()) return 0;  // more than was asked for: it is not worth reading
  transfer->failure_ = transfer->AddBody({data, one * size});
  if (!transfer->failure_.ok()) return 0;
  const Response& response = transfer->response_;
  // The rest of an error says nothing new, and may have no end.
  if (!response.ok() && response.body.size() == kMaxErrorBody) return 0;
  return complete() && transfer->MoreFollows() ? 0 : one * size;
}

bool Transfer::MoreFollows() const {
  const Range& range = *request_.range;
  return response_.status == 200 && range.offset + range.length != range.object_size;
}

absl::Status Transfer::AddHeader(std::string_view line) {
  header_bytes_ += line.size();
  if (header_bytes_ > kMaxHeaderBytes) {
    return absl::ResourceExhaustedError(
        fmt::format("the response has more than {} bytes of headers", kMaxHeaderBytes));
  }
  if (line.starts_with("HTTP/")) {  // another response: after a 100, or a proxy's
    response_.headers.clear();
    headers_complete_ = false;
    const size_t space = line.find(' ');
    response_.status = 0;
    if (space != std::string_view::npos) {
      const std::string_view code = line.substr(space + 1);
      std::from_chars(code.data(), code.data() + code.size(), response_.status);
    }
    return absl::OkStatus();
  }
  if (Trim(line).empty()) headers_complete_ = true;
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return absl::OkStatus();
  response_.headers.emplace(Lower(line.substr(0, colon)),
                            std::string(Trim(line.substr(colon + 1))));
  return absl::OkStatus();
}

absl::Status Transfer::AddBody(std::string_view data) {
  if (!response_.ok()) {
    const size_t room = kMaxErrorBody - std::min(response_.body.size(), kMaxErrorBody);
    response_.body.append(data.substr(0, room));
    return absl::OkStatus();
  }
  if (request_.range) {
    if (!range_begun_) RETURN_IF_ERROR(BeginRange());
    return AddToRange(data);
  }
  if (data.size() > request_.max_body - response_.body.size()) {
    return absl::ResourceExhaustedError(
        fmt::format("the response has more than {} bytes", request_.max_body));
  }
  response_.body.append(data);
  return absl::OkStatus();
}

absl::Status Transfer::BeginRange() {
  range_begun_ = true;
  const Range& range = *request_.range;
  if (!request_.sink) range_.reserve(range.length);
  const uint64_t begin = range.offset + received_;
  const std::string encoding = response_.Header("content-encoding");
  if (!encoding.empty() && encoding != "identity") {
    return absl::DataLossError(fmt::format("the server sent the object encoded as {}", encoding));
  }
  const auto wrong_size = [&](uint64_t size) {
    return absl::DataLossError(
        fmt::format("the object has {} bytes there instead of {}", size, range.object_size));
  };
  if (response_.status == 200) {
    const std::optional<uint64_t> size = ContentLength(response_);
    if (size && *size != range.object_size) return wrong_size(*size);
    if (begin > kMaxSkip) {
      return absl::FailedPreconditionError(
          fmt::format("the server does not support range requests (asked for bytes from {} on, it "
                      "sends all {})",
                      begin, range.object_size));
    }
    skip_ = begin;
    return absl::OkStatus();
  }
  if (response_.status != 206) {
    return absl::DataLossError(
        fmt::format("status {} is no answer to a range request", response_.status));
  }
  const std::string text = response_.Header("content-range");
  // Some servers leave it out. Nothing is lost by believing them: digests are checked above.
  if (text.empty()) {
    if (response_.Header("content-type").starts_with("multipart/byteranges")) {
      return absl::DataLossError("the server sent several ranges for one");
    }
    return absl::OkStatus();
  }
  const std::optional<ContentRange> sent = ParseContentRange(text);
  if (!sent || sent->first != begin) {
    return absl::DataLossError(fmt::format("asked for bytes {} to {}, the server sent '{}'", begin,
                                           range.offset + range.length - 1, text));
  }
  if (sent->size && *sent->size != range.object_size) return wrong_size(*sent->size);
  return absl::OkStatus();
}

absl::Status Transfer::AddToRange(std::string_view data) {
  const size_t skipped = static_cast<size_t>(std::min<uint64_t>(skip_, data.size()));
  skip_ -= skipped;
  data.remove_prefix(skipped);
  const std::string_view wanted = data.substr(0, request_.range->length - received_);
  received_ += wanted.size();
  if (!request_.sink) {
    range_.append(wanted);
  } else if (!wanted.empty() && !request_.sink(wanted)) {
    Curl().easy_pause(handle_.get(), CURLPAUSE_RECV);
  }
  return absl::OkStatus();
}

bool Transfer::HasProgress() const { return received_ - received_before_ >= kMinProgress; }

Transfer::Verdict Transfer::End(CURLcode code, double jitter) {
  // What the handle points to goes after it.
  const std::string error = error_[0] != '\0' ? error_.data() : Curl().easy_strerror(code);
  handle_.reset();
  headers_.reset();
  ++tries_;
  timed_out_ = code == CURLE_OPERATION_TIMEDOUT;
  over_limit_ = timed_out_ && std::chrono::steady_clock::now() >= ends_at_;
  if (!failure_.ok()) return Fail(failure_);
  const bool cut_short = request_.range && range_begun_ && RangeIsComplete();
  // What an error's body was to be does not matter (docker-registry promises more for 416 than it has).
  const bool is_refusal = headers_complete_ && response_.status >= 300;
  if (code == CURLE_OK || cut_short || is_refusal) return JudgeResponse(jitter);
  absl::Status status = absl::UnavailableError(error);
  // What OpenSSL makes of an answer in plain text.
  if (code == CURLE_SSL_CONNECT_ERROR && error.find("wrong version number") != error.npos) {
    status.SetPayload(kNoTlsPayload, absl::Cord());
    return Fail(std::move(status));
  }
  return MayPass(code) ? Retry(std::move(status), jitter) : Fail(std::move(status));
}

Transfer::Verdict Transfer::JudgeResponse(double jitter) {
  if (IsRedirect(response_.status) && request_.follow_redirects) {
    if (std::optional<Verdict> verdict = Redirect(); verdict.has_value())
      return *std::move(verdict);
  }
  if (MayPass(response_.status)) return RetryOrGiveResponse(jitter);
  if (request_.range) {
    if (response_.status == 416) {
      return Fail(absl::DataLossError(
          fmt::format("bytes {} to {} are past the end of the object there", request_.range->offset,
                      request_.range->offset + request_.range->length - 1)));
    }
    if (response_.ok()) {
      if (!range_begun_) {  // there was no body
        if (absl::Status status = BeginRange(); !status.ok()) return Fail(std::move(status));
      }
      if (!RangeIsComplete()) {
        absl::Status status = absl::DataLossError(fmt::format(
            "the response ends after {} of {} bytes", received_, request_.range->length));
        // Servers may send less than they are asked for: ask for the rest.
        if (HasProgress()) {
          --tries_;
          return Verdict{};
        }
        return Retry(std::move(status), jitter);
      }
      response_.body = std::move(range_);
    }
  }
  response_.url = url_->text;
  return {.result = std::move(response_)};
}

std::optional<Transfer::Verdict> Transfer::Redirect() {
  const bool keeps_method = response_.status == 307 || response_.status == 308;
  const bool reads = request_.method == "GET" || request_.method == "HEAD";
  const std::string location = response_.Header("location");
  if (location.empty() || (!reads && !keeps_method)) return std::nullopt;
  if (++redirects_ > kMaxRedirects) {
    return Fail(
        absl::FailedPreconditionError(fmt::format("more than {} redirects", kMaxRedirects)));
  }
  absl::StatusOr<Url> next = url_->Resolve(location);
  if (!next.ok()) return Fail(Annotate(next.status(), "redirect"));
  if (url_->is_https() && !next->is_https()) {
    return Fail(absl::FailedPreconditionError(
        fmt::format("a redirect from https to http (host {}) is refused", next->host)));
  }
  if (absl::Status status = CheckScheme(*next); !status.ok()) {
    return Fail(Annotate(std::move(status), "redirect"));
  }
  url_ = *std::move(next);
  --tries_;  // it is still the same one
  return Verdict{};
}

Transfer::Verdict Transfer::Retry(absl::Status why, double jitter,
                                  std::optional<std::chrono::seconds> asked) {
  // What takes for ever would do so by one small part after the other.
  if (HasProgress() && !over_limit_) tries_ = 0;
  if (tries_ >= request_.attempts) return Fail(std::move(why));
  std::chrono::milliseconds pause = options_.first_backoff * (1 << std::clamp(tries_ - 1, 0, 10));
  pause = std::min(pause, options_.max_backoff);
  pause = std::chrono::milliseconds(
      static_cast<int64_t>(static_cast<double>(pause.count()) * (0.5 + jitter / 2)));
  if (asked) pause = std::max(pause, std::chrono::milliseconds(*asked));
  // From the start: what a redirect led to may have been valid for a moment only.
  url_ = first_url_;
  redirects_ = 0;
  return {.pause = pause};
}

Transfer::Verdict Transfer::RetryOrGiveResponse(double jitter) {
  const std::optional<std::chrono::seconds> asked =
      ParseRetryAfter(response_.Header("retry-after"), std::chrono::system_clock::now());
  const bool too_long = asked && *asked > options_.max_retry_after;
  const bool is_busy = response_.status == 429 || response_.status == 503;
  if (asked && is_busy && request_.busy) request_.busy(*asked);
  if (tries_ >= request_.attempts || too_long) {
    response_.url = url_->text;
    return {.result = std::move(response_)};
  }
  return Retry(absl::OkStatus(), jitter, asked);
}

Transfer::Verdict Transfer::Fail(const absl::Status& status) const {
  absl::Status named = Annotate(status, Name());
  if (const auto payload = status.GetPayload(kNoTlsPayload)) {
    named.SetPayload(kNoTlsPayload, *payload);
  }
  return {.result = std::move(named)};
}

}  // namespace lamina::http
