// SPDX-License-Identifier: Apache-2.0
//
// What registries, token servers and auth files say, and the references that users give: headers,
// JSON, URLs. Whatever is accepted as a reference must be the same after it is written.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "chunkstore/http/client.h"
#include "chunkstore/http/url.h"
#include "chunkstore/registry/challenge.h"
#include "chunkstore/registry/credentials.h"
#include "chunkstore/registry/errors.h"
#include "chunkstore/registry/reference.h"
#include "chunkstore/registry/settings.h"
#include "chunkstore/registry/token_source.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckReference(std::string_view text) {
  const auto reference = lamina::registry::Reference::Parse(text);
  if (!reference.ok()) return;
  const auto again = lamina::registry::Reference::Parse(reference->ToString());
  Require(again.ok() && again->ToString() == reference->ToString());
  // It goes into URLs as it is.
  const std::string path = reference->repository + reference->tag;
  Require(path.find_first_of("?#%\\ \r\n") == std::string::npos);
  Require(path.find("..") == std::string::npos || !reference->tag.empty());
}

void CheckUrl(std::string_view text) {
  const auto url = lamina::http::Url::Parse(text);
  if (!url.ok()) return;
  const auto again = lamina::http::Url::Parse(url->text);
  Require(again.ok() && again->SameOrigin(*url));
  const auto relative = again->Resolve(text);
  Require(relative.ok() && relative->SameOrigin(*url));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lamina;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const registry::Challenge& challenge : registry::ParseChallenges(text)) {
    Require(!challenge.scheme.empty());
  }
  CheckReference(text);
  CheckUrl(text);
  (void)registry::FindInAuthFile(text, "auth.json", "registry.example", "a/b");
  (void)registry::ParseTokenAnswer(text);
  (void)registry::Mirror::Parse(text);
  (void)registry::ErrorOf({.status = 400, .body = std::string(text)});
  (void)http::ParseRetryAfter(text, {});
  if (const auto range = http::ParseContentRange(text)) Require(range->first <= range->last);
  return 0;
}
