// SPDX-License-Identifier: Apache-2.0
//
// A slot: a process that has the control groups of one call at a time, and always the next jail ready.
// Jails are born in its groups: moving a process into one waits for all processors.
#ifndef LAMINA_BACKENDS_FNCALL_SLOT_H_
#define LAMINA_BACKENDS_FNCALL_SLOT_H_

#include <sys/types.h>

#include <string>

#include "backends/fncall/jail.h"
#include "backends/sandbox.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fncall {

struct SlotOptions {
  JailOptions jail;
  std::string cgroup;  // of the slot
  backends::Limits limits;
};

// Starts a slot's process, with its first jail ready when this returns. Calls go to the socket, one at
// a time, and reports come back from it. It ends when the other end of the socket does. For a process
// with one thread.
absl::StatusOr<UniqueFd> StartSlot(const SlotOptions& options);

}  // namespace lamina::fncall

#endif  // LAMINA_BACKENDS_FNCALL_SLOT_H_
