// SPDX-License-Identifier: Apache-2.0
//
// How registries are reached, as a user says it: the same for every command and for the engine.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_SETTINGS_H_
#define LAMINA_CHUNKSTORE_REGISTRY_SETTINGS_H_

#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/registry/credentials.h"

namespace lamina::registry {

// Another server for the content of a registry: a pull-through cache, or a peer of this node.
struct Mirror {
  std::string registry;  // "docker.io"; empty: any
  std::string url;       // "https://mirror.example", or with a path that stands in for "/v2"

  // "[REGISTRY=]URL".
  static absl::StatusOr<Mirror> Parse(std::string_view text);
};

// Holds secrets (see CredentialSources).
struct Settings {
  CredentialSources credentials;
  bool plain_http = false;      // registries are asked over http, unencrypted
  std::string ca_file;          // absolute; authorities beside the system's
  std::vector<Mirror> mirrors;  // asked in this order, before the registry itself
};

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_SETTINGS_H_
