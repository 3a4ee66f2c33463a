// SPDX-License-Identifier: Apache-2.0
//
// The process of a call, seen from the first process of its jail.
#ifndef LAMINA_BACKENDS_FNCALL_CALL_PROCESS_H_
#define LAMINA_BACKENDS_FNCALL_CALL_PROCESS_H_

#include "backends/fncall/call.h"
#include "backends/fncall/jail.h"

namespace lamina::fncall {

// Runs the call to its end and kills all that is left then. Takes orders from `socket` meanwhile.
Report RunCall(const JailOptions& options, int socket, CallDescriptors descriptors);

}  // namespace lamina::fncall

#endif  // LAMINA_BACKENDS_FNCALL_CALL_PROCESS_H_
