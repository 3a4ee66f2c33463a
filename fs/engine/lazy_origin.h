// SPDX-License-Identifier: Apache-2.0
//
// The origin of an image that is opened when something is read from it: for mounts that are served
// again from what is on the node, when the origin may be slow, or away; and for layers whose image
// need not be looked at.
#ifndef LAMINA_FS_ENGINE_LAZY_ORIGIN_H_
#define LAMINA_FS_ENGINE_LAZY_ORIGIN_H_

#include <functional>
#include <memory>
#include <string>

#include "chunkstore/origin.h"
#include "fs/image/image_store.h"

namespace lamina::fs {

// `reference` as in OpenImage; `access` is called when it is opened. An origin that cannot be opened
// is an error of that read; the next one tries again.
std::shared_ptr<chunkstore::Origin> MakeLazyOrigin(
    std::string reference, std::function<absl::StatusOr<RegistryAccess>()> access);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_LAZY_ORIGIN_H_
