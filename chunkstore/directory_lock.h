// SPDX-License-Identifier: Apache-2.0
//
// Keeps a second process out of a directory of the node's state.
#ifndef LAMINA_CHUNKSTORE_DIRECTORY_LOCK_H_
#define LAMINA_CHUNKSTORE_DIRECTORY_LOCK_H_

#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::chunkstore {

// Makes the directory if it is missing and locks it for as long as the descriptor is open: the lock
// ends with the process, however it ends. kUnavailable if someone else (or another object in this
// process) holds it.
absl::StatusOr<UniqueFd> LockDirectory(const std::string& directory);

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_DIRECTORY_LOCK_H_
