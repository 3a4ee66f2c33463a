// SPDX-License-Identifier: Apache-2.0
//
// Starts the programs beside `lamina` that sandboxes are made of: they are nobody's children, and live on
// when the launcher ends.
#ifndef LAMINA_BACKENDS_HELPER_PROCESS_H_
#define LAMINA_BACKENDS_HELPER_PROCESS_H_

#include <string>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::backends {

// The helper's descriptors: `descriptors` become 3, 4, ..., and the one after them is for it to close
// when it is ready, or to write the reason to why it will not be. The next one is `lock`, which it closes
// then as well: a lock on it lasts until it is ready also if this process is killed. It has no others.
inline constexpr int kFirstHelperDescriptor = 3;

// Starts `arguments` (a path first) in a session of its own, without standard streams, and waits until
// it is ready. Errors have what it wrote.
absl::Status StartHelper(const std::vector<std::string>& arguments,
                         const std::vector<int>& descriptors, int lock);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_HELPER_PROCESS_H_
