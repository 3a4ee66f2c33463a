// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_CHUNKSTORE_BASE_DIRECTORY_NAMES_H_
#define LAMINA_CHUNKSTORE_BASE_DIRECTORY_NAMES_H_

#include <string>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina {

// The names in an open directory but "." and "..", in no order, whatever was read of it before; the
// descriptor may be of O_PATH. kNotFound if the directory has been removed.
absl::StatusOr<std::vector<std::string>> DirectoryNames(int directory);

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_DIRECTORY_NAMES_H_
