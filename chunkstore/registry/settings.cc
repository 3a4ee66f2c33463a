// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/settings.h"

#include "chunkstore/http/url.h"
#include "chunkstore/registry/reference.h"

namespace lamina::registry {

absl::StatusOr<Mirror> Mirror::Parse(std::string_view text) {
  Mirror mirror;
  std::string_view url = text;
  const size_t equals = text.find('=');
  if (equals != std::string_view::npos && equals < text.find('/')) {
    mirror.registry = std::string(text.substr(0, equals));
    url = text.substr(equals + 1);
    RETURN_IF_ERROR(CheckHost(mirror.registry), "mirror '{}'", text);
  }
  ASSIGN_OR_RETURN(const http::Url parsed, http::Url::Parse(url), "mirror '{}'", text);
  if (parsed.text.find('?') != std::string::npos) {
    return absl::InvalidArgumentError(fmt::format("mirror '{}': a query is of no use here", text));
  }
  mirror.url = parsed.text;
  while (mirror.url.ends_with('/')) mirror.url.pop_back();
  return mirror;
}

}  // namespace lamina::registry
