// SPDX-License-Identifier: Apache-2.0
//
// The header WWW-Authenticate (RFC 9110, section 11.6.1), as registries use it: "Basic realm=..." or
// "Bearer realm=...,service=...,scope=..." (distribution-spec and its token documents).
#ifndef LAMINA_CHUNKSTORE_REGISTRY_CHALLENGE_H_
#define LAMINA_CHUNKSTORE_REGISTRY_CHALLENGE_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lamina::registry {

struct Challenge {
  std::string scheme;                             // lower case
  std::map<std::string, std::string> parameters;  // names in lower case, values without quotes

  std::string Parameter(std::string_view name) const;  // empty if it is not there
};

// All challenges of one header value. What is malformed ends the list: what came before is kept.
std::vector<Challenge> ParseChallenges(std::string_view header);

// The one to answer: Bearer if it says where tokens are to be had, or else Basic; null if there is
// neither.
const Challenge* FindUsable(const std::vector<Challenge>& challenges);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_CHALLENGE_H_
