// SPDX-License-Identifier: Apache-2.0
//
// Blobs of a repository in a registry, read in parts.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_REGISTRY_ORIGIN_H_
#define LAMINA_CHUNKSTORE_REGISTRY_REGISTRY_ORIGIN_H_

#include <memory>

#include "chunkstore/origin.h"
#include "chunkstore/registry/repository.h"

namespace lamina::registry {

// Nothing goes over the network before the first Open.
std::unique_ptr<chunkstore::Origin> MakeRegistryOrigin(std::shared_ptr<Repository> repository);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_REGISTRY_ORIGIN_H_
