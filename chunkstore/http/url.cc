// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/http/url.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>

#include "chunkstore/http/curl_library.h"

namespace lamina::http {
namespace {

constexpr size_t kMaxLength = 16 << 10;

struct FreeUrl {
  void operator()(CURLU* url) const { Curl().url_cleanup(url); }
};
using Handle = std::unique_ptr<CURLU, FreeUrl>;

bool Get(CURLU* url, CURLUPart part, unsigned flags, std::string* into) {
  char* text = nullptr;
  if (Curl().url_get(url, part, &text, flags) != CURLUE_OK) return false;
  *into = text;
  Curl().free(text);
  return true;
}

char LowerLetter(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

absl::Status NotAUrl(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(fmt::format("'{}' is no URL: {}", text.substr(0, 200), why));
}

absl::StatusOr<Url> Read(CURLU* handle, std::string_view text) {
  Url url;
  std::string ignored;
  if (Get(handle, CURLUPART_USER, 0, &ignored) || Get(handle, CURLUPART_PASSWORD, 0, &ignored)) {
    // The text is not repeated: it has a password in it.
    return absl::InvalidArgumentError("a URL with a user name or password in it is refused");
  }
  Curl().url_set(handle, CURLUPART_FRAGMENT, nullptr, 0);
  if (!Get(handle, CURLUPART_URL, 0, &url.text) || !Get(handle, CURLUPART_SCHEME, 0, &url.scheme) ||
      !Get(handle, CURLUPART_HOST, 0, &url.host) ||
      !Get(handle, CURLUPART_PORT, CURLU_DEFAULT_PORT, &url.port)) {
    return NotAUrl(text, "it has no scheme or host");
  }
  if (url.scheme != "http" && url.scheme != "https") {
    return NotAUrl(text, "the scheme is neither http nor https");
  }
  std::transform(url.host.begin(), url.host.end(), url.host.begin(), LowerLetter);
  return url;
}

absl::StatusOr<Url> Set(std::string_view base, std::string_view text) {
  if (text.size() > kMaxLength) return NotAUrl(text, "it is too long");
  if (text.find('\0') != std::string_view::npos) return NotAUrl("...", "it has a NUL in it");
  RETURN_IF_ERROR(LoadCurl());
  const Handle handle(Curl().url());
  if (handle == nullptr) return absl::ResourceExhaustedError("no memory for a URL");
  // The second call is relative to the first.
  for (const std::string_view part : {base, text}) {
    if (part.empty()) continue;
    const CURLUcode code =
        Curl().url_set(handle.get(), CURLUPART_URL, std::string(part).c_str(), 0);
    if (code != CURLUE_OK) return NotAUrl(text, Curl().url_strerror(code));
  }
  return Read(handle.get(), text);
}

}  // namespace

absl::StatusOr<Url> Url::Parse(std::string_view text) { return Set("", text); }

absl::StatusOr<Url> Url::Resolve(std::string_view reference) const { return Set(text, reference); }

bool Url::SameOrigin(const Url& other) const {
  return scheme == other.scheme && host == other.host && port == other.port;
}

bool EqualIgnoringCase(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, {}, LowerLetter, LowerLetter);
}

bool IsLoopback(std::string_view host) {
  if (EqualIgnoringCase(host, "localhost") || host == "[::1]" || host == "::1") return true;
  std::array<unsigned, 4> parts{};
  const char* next = host.data();
  const char* const end = host.data() + host.size();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0 && (next == end || *next++ != '.')) return false;
    const auto [parsed, error] = std::from_chars(next, end, parts[i]);
    if (error != std::errc() || parts[i] > 255) return false;
    next = parsed;
  }
  return next == end && parts[0] == 127;
}

std::string Escape(std::string_view text) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  std::string escaped;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::string_view("-._~").find(c) != std::string_view::npos;
    if (plain) {
      escaped += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      escaped += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return escaped;
}

}  // namespace lamina::http
