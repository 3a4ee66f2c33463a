// SPDX-License-Identifier: Apache-2.0
//
// Programs called docker-credential-NAME that keep credentials (docker/docker-credential-helpers):
// "get" with the registry on standard input gives JSON on standard output.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_CREDENTIAL_HELPER_H_
#define LAMINA_CHUNKSTORE_REGISTRY_CREDENTIAL_HELPER_H_

#include <optional>
#include <string>
#include <string_view>

#include "chunkstore/registry/credentials.h"

namespace lamina::registry {

// Nothing if the helper has none for this registry. kDeadlineExceeded if it takes longer than half a
// minute: it may be asking someone who is not there.
absl::StatusOr<std::optional<Credential>> AskHelper(const std::string& name,
                                                    std::string_view registry);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_CREDENTIAL_HELPER_H_
