// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_BACKENDS_AGENT_PSEUDO_FILE_H_
#define LAMINA_BACKENDS_AGENT_PSEUDO_FILE_H_

#include <string>

namespace lamina::agent {

// What a file of the kernel (in /proc or /sys) says, up to 4 MiB: it has no size to go by. Empty if it
// cannot be read.
std::string ReadPseudoFile(const std::string& path);

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_PSEUDO_FILE_H_
