// SPDX-License-Identifier: Apache-2.0
//
// Messages on unix sockets that bring an open descriptor along (unix(7), SCM_RIGHTS).
#ifndef LAMINA_CHUNKSTORE_BASE_DESCRIPTOR_MESSAGE_H_
#define LAMINA_CHUNKSTORE_BASE_DESCRIPTOR_MESSAGE_H_

#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina {

// Longer ones are cut.
inline constexpr size_t kMaxDescriptorMessage = 4096;

struct DescriptorMessage {
  std::string text;  // empty if the other end has closed
  UniqueFd fd;       // not valid if none came
};

// Receives one message, with the first of its descriptors. `flags` are recvmsg(2)'s; with
// MSG_DONTWAIT an error if there is none.
absl::StatusOr<DescriptorMessage> ReceiveDescriptorMessage(int socket, int flags = 0);

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_DESCRIPTOR_MESSAGE_H_
