// SPDX-License-Identifier: Apache-2.0
//
// Has a machine's kernel give up what nobody has used for a while.
#ifndef LAMINA_BACKENDS_AGENT_RECLAIM_H_
#define LAMINA_BACKENDS_AGENT_RECLAIM_H_

#include "chunkstore/base/status.h"

namespace lamina::agent {

// Starts DAMON on the machine's memory with a scheme that takes back file pages which were not accessed
// for half a minute (Linux, admin-guide/mm/damon/usage.rst): what is read back from a disk costs little,
// and the host gets the memory by free page reporting. For a machine's own kernel only: on a host it
// would work on everybody's memory. kUnimplemented if the kernel has no DAMON.
absl::Status StartReclaim();

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_RECLAIM_H_
