// SPDX-License-Identifier: Apache-2.0
//
// Programs of the machine that are run for what they do better.
#ifndef LAMINA_CHUNKSTORE_BASE_PROGRAM_H_
#define LAMINA_CHUNKSTORE_BASE_PROGRAM_H_

#include <cstddef>
#include <string>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina {

// Runs a program that is found on PATH to its end; what it says goes into the error.
// kFailedPrecondition if it is not there.
absl::Status RunProgram(const std::vector<std::string>& words);

// What comes from a pipe until its other end is closed. What is behind the first `most` bytes is read and
// forgotten, so that whoever writes is not held up.
absl::StatusOr<std::string> ReadToEnd(int fd, size_t most);

// Copies a tree as it is: every attribute, hard links, device nodes and holes; by reference where the
// file system can. `to` must not be there.
absl::Status CopyTree(const std::string& from, const std::string& to);

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_PROGRAM_H_
