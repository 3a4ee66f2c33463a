// SPDX-License-Identifier: Apache-2.0
//
// Programs called docker-credential-NAME that keep credentials (docker/docker-credential-helpers):
// "get" with the registry on standard input gives JSON on standard output.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_CREDENTIAL_HELPER_H_
#define LAMINA_CHUNKSTORE_REGISTRY_CREDENTIAL_HELPER_H_

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "chunkstore/registry/credentials.h"

namespace lamina::registry {

// Nothing if the helper has none for this registry. kDeadlineExceeded if it takes too long, and it is
// killed then with all that it has started: it may be asking someone who is not there. Errors do not
// repeat what it printed, which may be a secret.
absl::StatusOr<std::optional<Credential>> AskHelper(
    const std::string& name, std::string_view registry,
    std::chrono::milliseconds patience = std::chrono::seconds(30));

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_CREDENTIAL_HELPER_H_
