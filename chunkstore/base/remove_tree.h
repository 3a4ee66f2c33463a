// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_CHUNKSTORE_BASE_REMOVE_TREE_H_
#define LAMINA_CHUNKSTORE_BASE_REMOVE_TREE_H_

#include <string>

#include "chunkstore/base/status.h"

namespace lamina {

// Removes a directory and all below it, however deep: others may have made it, to be in the way. Needs
// few descriptors and follows no links. Nothing that is mounted below is removed: that is an error, as
// is whatever else cannot be removed, and what is left can be removed by another try. OK if there is no
// such directory.
absl::Status RemoveTree(const std::string& directory);

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_REMOVE_TREE_H_
