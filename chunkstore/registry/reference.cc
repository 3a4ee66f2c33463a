// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/reference.h"

#include <algorithm>
#include <charconv>

#include "chunkstore/http/url.h"

namespace lamina::registry {
namespace {

constexpr size_t kMaxName = 255;
constexpr size_t kMaxTag = 128;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsLower(char c) { return (c >= 'a' && c <= 'z') || IsDigit(c); }
bool IsWord(char c) { return IsLower(c) || (c >= 'A' && c <= 'Z'); }

// domain-component := [a-zA-Z0-9] | [a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9], joined by dots.
bool IsDomain(std::string_view text) {
  while (true) {
    const size_t dot = text.find('.');
    const std::string_view part = text.substr(0, dot);
    const bool valid =
        !part.empty() && IsWord(part.front()) && IsWord(part.back()) &&
        std::all_of(part.begin(), part.end(), [](char c) { return IsWord(c) || c == '-'; });
    if (!valid) return false;
    if (dot == std::string_view::npos) return true;
    text.remove_prefix(dot + 1);
  }
}

bool IsIpv6(std::string_view text) {
  return text.size() > 4 && text.starts_with('[') && text.ends_with(']') &&
         text.find_first_not_of("0123456789abcdefABCDEF:.", 1) == text.size() - 1;
}

// path-component := [a-z0-9]+ ((\.|_|__|-+) [a-z0-9]+)*
bool IsPathComponent(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    if (IsLower(text[i])) {
      ++i;
      continue;
    }
    const size_t end = text.find_first_not_of(text[i], i);
    if (i == 0 || end == std::string_view::npos || !IsLower(text[end])) return false;
    const size_t count = end - i;
    const bool valid =
        text[i] == '-' || (text[i] == '_' && count <= 2) || (text[i] == '.' && count == 1);
    if (!valid) return false;
    i = end;
  }
  return !text.empty();
}

bool IsRepository(std::string_view text) {
  while (true) {
    const size_t slash = text.find('/');
    if (!IsPathComponent(text.substr(0, slash))) return false;
    if (slash == std::string_view::npos) return true;
    text.remove_prefix(slash + 1);
  }
}

absl::Status Invalid(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(fmt::format(
      "'{}' is not HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]: {}", text.substr(0, 500), why));
}

}  // namespace

bool IsTag(std::string_view text) {
  return !text.empty() && text.size() <= kMaxTag && text[0] != '.' && text[0] != '-' &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return IsWord(c) || c == '_' || c == '.' || c == '-'; });
}

absl::Status CheckHost(std::string_view text) {
  std::string_view name = text;
  const size_t colon = text.rfind(':');
  if (colon != std::string_view::npos && !text.ends_with(']')) {
    name = text.substr(0, colon);
    const std::string_view port = text.substr(colon + 1);
    unsigned number = 0;
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
    if (error != std::errc() || end != port.data() + port.size() || number == 0 || number > 65535) {
      return absl::InvalidArgumentError(fmt::format("'{}' is not a port number", port));
    }
  }
  if (IsDomain(name) || IsIpv6(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("'{}' is not a host name or address", name));
}

absl::StatusOr<Reference> Reference::Parse(std::string_view text) {
  Reference reference;
  std::string_view rest = text;
  if (const size_t at = rest.find('@'); at != std::string_view::npos) {
    absl::StatusOr<Digest> digest = Digest::Parse(rest.substr(at + 1));
    if (!digest.ok()) return Invalid(text, std::string(digest.status().message()));
    reference.digest = *digest;
    rest = rest.substr(0, at);
  }
  const size_t slash = rest.find('/');
  reference.host = std::string(rest.substr(0, slash));
  const bool has_host =
      slash != std::string_view::npos && (reference.host.find_first_of(".:") != std::string::npos ||
                                          http::EqualIgnoringCase(reference.host, "localhost"));
  if (!has_host) {
    return Invalid(text, "it names no registry; images of Docker Hub are docker.io/library/NAME");
  }
  if (absl::Status status = CheckHost(reference.host); !status.ok()) {
    return Invalid(text, std::string(status.message()));
  }
  rest = rest.substr(slash + 1);
  if (const size_t colon = rest.rfind(':'); colon != std::string_view::npos) {
    reference.tag = std::string(rest.substr(colon + 1));
    rest = rest.substr(0, colon);
    if (!IsTag(reference.tag)) {
      return Invalid(text, fmt::format("'{}' is not a tag", reference.tag.substr(0, 200)));
    }
  } else if (!reference.digest) {
    reference.tag = "latest";
  }
  reference.repository = std::string(rest);
  if (reference.host == "docker.io" && rest.find('/') == std::string_view::npos) {
    reference.repository = fmt::format("library/{}", rest);
  }
  if (!IsRepository(rest) || reference.host.size() + reference.repository.size() > kMaxName) {
    return Invalid(text, fmt::format("'{}' is not the name of a repository (lower-case letters and "
                                     "digits, with . _ __ or - between them)",
                                     rest));
  }
  return reference;
}

std::string Reference::ToString() const {
  std::string text = fmt::format("{}/{}", host, repository);
  if (!tag.empty()) text += ":" + tag;
  if (digest) text += "@" + digest->ToString();
  return text;
}

}  // namespace lamina::registry
