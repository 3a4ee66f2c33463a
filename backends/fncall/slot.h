// SPDX-License-Identifier: Apache-2.0
//
// A slot: a process that has the control groups of one call at a time, and always the next jail ready.
// Jails are born in its groups: moving a process into one waits for all processors.
#ifndef LAMINA_BACKENDS_FNCALL_SLOT_H_
#define LAMINA_BACKENDS_FNCALL_SLOT_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

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

// Starts slots for a process that has threads, which cannot fork them itself: a process of its own. It
// ends with the one that made it, and slots with it.
class SlotStarter {
 public:
  // Before there are threads.
  static absl::StatusOr<SlotStarter> Start(std::vector<SlotOptions> slots);

  // Starts the process of one of the slots, or another one in place of one that has ended. Its first
  // jail is ready when this returns. An empty report comes from the socket when a call may go to it, and
  // then the call's; one at a time. It ends when the other end of the socket does. For one thread at a
  // time.
  absl::StatusOr<UniqueFd> StartSlot(uint32_t slot);

 private:
  explicit SlotStarter(UniqueFd socket) : socket_(std::move(socket)) {}

  UniqueFd socket_;
};

}  // namespace lamina::fncall

#endif  // LAMINA_BACKENDS_FNCALL_SLOT_H_
