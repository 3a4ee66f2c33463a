// SPDX-License-Identifier: Apache-2.0
#include "fs/image/reference.h"

#include <array>
#include <utility>

#include "chunkstore/registry/reference.h"

namespace lamina::fs {
namespace {

constexpr std::array<std::pair<std::string_view, ImageTransport>, 5> kTransports = {{
    {"oci", ImageTransport::kOciLayout},
    {"oci-archive", ImageTransport::kOciArchive},
    {"docker-archive", ImageTransport::kDockerArchive},
    {"dir", ImageTransport::kDirectory},
    {"docker", ImageTransport::kRegistry},
}};

bool IsAlphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

// ref       ::= component ("/" component)*
// component ::= alphanum (separator alphanum)*
// alphanum  ::= [A-Za-z0-9]+
// separator ::= [-._:@+] | "--"
bool IsTag(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (IsAlphanumeric(text[i])) continue;
    if (std::string_view("-._:@+/").find(text[i]) == std::string_view::npos) return false;
    // What stands between words is one character, or two dashes.
    if (i == 0 || i + 1 == text.size()) return false;
    if (text.substr(i, 2) == "--") ++i;
    if (i + 1 == text.size() || !IsAlphanumeric(text[i + 1])) return false;
  }
  return !text.empty();
}

}  // namespace

absl::StatusOr<ImageReference> ImageReference::Parse(std::string_view text) {
  ImageReference reference;
  const size_t colon = text.find(':');
  const std::string_view transport = text.substr(0, colon);
  bool known = false;
  for (const auto& [name, value] : kTransports) {
    if (name != transport) continue;
    reference.transport = value;
    known = true;
  }
  if (!known || colon == std::string_view::npos) {
    return absl::InvalidArgumentError(
        fmt::format("'{}': not an image reference; use oci:DIR[:TAG], oci-archive:FILE[:TAG], "
                    "docker-archive:FILE[:REF], dir:PATH or "
                    "docker://HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]",
                    text));
  }
  std::string_view rest = text.substr(colon + 1);
  if (reference.transport == ImageTransport::kRegistry) {
    if (!rest.starts_with("//")) {
      return absl::InvalidArgumentError(fmt::format("'{}': // is missing after docker:", text));
    }
    reference.path = std::string(rest.substr(2));
    RETURN_IF_ERROR(registry::Reference::Parse(reference.path).status());
    return reference;
  }
  if (reference.transport != ImageTransport::kDirectory) {
    if (const size_t end = rest.find(':'); end != std::string_view::npos) {
      reference.name = std::string(rest.substr(end + 1));
      rest = rest.substr(0, end);
      if (reference.name.empty()) {
        return absl::InvalidArgumentError(fmt::format("'{}': nothing after the last colon", text));
      }
    }
  }
  if (rest.empty()) return absl::InvalidArgumentError(fmt::format("'{}': the path is empty", text));
  if (rest.find('\0') != std::string_view::npos) {
    return absl::InvalidArgumentError("image reference: the path has a NUL in it");
  }
  reference.path = std::string(rest);
  const bool has_tag = reference.transport == ImageTransport::kOciLayout ||
                       reference.transport == ImageTransport::kOciArchive;
  if (has_tag && !reference.name.empty() && !IsTag(reference.name)) {
    return absl::InvalidArgumentError(
        fmt::format("'{}': '{}' is not a valid tag (letters and digits, with single - . _ : @ + / "
                    "between them)",
                    text, reference.name));
  }
  return reference;
}

absl::StatusOr<ImageReference> ImageReference::ParseConverted(std::string_view text) {
  ASSIGN_OR_RETURN(ImageReference reference, Parse(text));
  if (reference.transport != ImageTransport::kOciLayout &&
      reference.transport != ImageTransport::kRegistry) {
    return absl::InvalidArgumentError(fmt::format(
        "'{}': must be an OCI layout, oci:DIR[:TAG], or in a registry, docker://HOST/...", text));
  }
  return reference;
}

}  // namespace lamina::fs
