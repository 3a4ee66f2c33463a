// SPDX-License-Identifier: Apache-2.0
//
// URLs as requests and redirects need them, parsed by libcurl, which is also what connects: two
// parsers that differ are how credentials end up at the wrong host.
#ifndef LAMINA_CHUNKSTORE_HTTP_URL_H_
#define LAMINA_CHUNKSTORE_HTTP_URL_H_

#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina::http {

struct Url {
  std::string text;    // normalised, without user name, password and fragment
  std::string scheme;  // "http" or "https"
  std::string host;    // lower case; an IPv6 address has its brackets
  std::string port;    // always there

  // An absolute URL. kInvalidArgument for other schemes, and for URLs with a user name or password in
  // them: they would end up in logs.
  static absl::StatusOr<Url> Parse(std::string_view text);
  // `reference` as it is found in a document at this URL (RFC 3986, section 5).
  absl::StatusOr<Url> Resolve(std::string_view reference) const;

  // Scheme, host and port are the same: what a credential may be sent to.
  bool SameOrigin(const Url& other) const;
  bool is_https() const { return scheme == "https"; }
};

// ASCII, as host names and the words of headers are compared.
bool EqualIgnoringCase(std::string_view a, std::string_view b);

// "localhost", 127.0.0.0/8 or [::1]; nothing that needs to be looked up first.
bool IsLoopback(std::string_view host);

// `text` with everything but unreserved characters percent-encoded (RFC 3986, section 2.3).
std::string Escape(std::string_view text);

}  // namespace lamina::http

#endif  // LAMINA_CHUNKSTORE_HTTP_URL_H_
