// SPDX-License-Identifier: Apache-2.0
//
// Errors of registries as statuses.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_ERRORS_H_
#define LAMINA_CHUNKSTORE_REGISTRY_ERRORS_H_

#include "chunkstore/http/client.h"

namespace lamina::registry {

// Of a response that is no success: a code that fits, and a text with the status and what the server
// says in the body (distribution-spec, "Error Codes"), cut and made fit for a terminal.
absl::Status ErrorOf(const http::Response& response);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_ERRORS_H_
