// SPDX-License-Identifier: Apache-2.0
//
// Names of images in registries: HOST[:PORT]/REPOSITORY[:TAG][@DIGEST], by the grammar of the
// distribution project (distribution/reference), which is stricter than URLs: what parses here can be
// put into one as it is.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_REFERENCE_H_
#define LAMINA_CHUNKSTORE_REGISTRY_REFERENCE_H_

#include <optional>
#include <string>
#include <string_view>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"

namespace lamina::registry {

struct Reference {
  std::string host;        // "registry.example:5000"; an IPv6 address has brackets
  std::string repository;  // "library/debian"
  std::string tag;         // "latest" if neither tag nor digest was given, else may be empty
  std::optional<Digest> digest;

  // Without "docker://". The host must be there: what has no dot and no port and is not "localhost"
  // is refused, as other tools would take it for a repository of docker.io. A repository of docker.io
  // with one part is one of its "library/".
  static absl::StatusOr<Reference> Parse(std::string_view text);

  // What a manifest is asked for by: the digest if there is one, else the tag.
  std::string TagOrDigest() const { return digest ? digest->ToString() : tag; }
  std::string ToString() const;
};

bool IsTag(std::string_view text);
// "HOST[:PORT]", as in a Reference. kInvalidArgument if it is not.
absl::Status CheckHost(std::string_view text);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_REFERENCE_H_
