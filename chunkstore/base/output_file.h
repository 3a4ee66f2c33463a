// SPDX-License-Identifier: Apache-2.0
//
// Files that a user names for what a program has to say.
#ifndef LAMINA_CHUNKSTORE_BASE_OUTPUT_FILE_H_
#define LAMINA_CHUNKSTORE_BASE_OUTPUT_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina {

// As WriteFileAtomically, but the file that a symbolic link leads to is replaced, not the link; and what is
// no regular file, as a FIFO or a device, is opened and written, where `mode` is of no use.
absl::Status WriteOutputFile(const std::string& path, std::string_view content,
                             uint32_t mode = 0644);
// Whether WriteOutputFile could write there, for work that would be lost if it could not.
absl::Status CheckOutputFile(const std::string& path);

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_OUTPUT_FILE_H_
