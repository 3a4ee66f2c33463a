// SPDX-License-Identifier: Apache-2.0
//
// Messages on unix sockets that bring open descriptors along (unix(7), SCM_RIGHTS).
#ifndef LAMINA_CHUNKSTORE_BASE_DESCRIPTOR_MESSAGE_H_
#define LAMINA_CHUNKSTORE_BASE_DESCRIPTOR_MESSAGE_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina {

// Longer ones are cut.
inline constexpr size_t kMaxDescriptorMessage = 4096;
// More are closed.
inline constexpr size_t kMaxDescriptors = 5;

struct DescriptorMessage {
  std::string text;  // empty if the other end has closed
  std::vector<UniqueFd>
      fds;  // those that came; fewer than were sent if this process can have no more

  // The first one, for messages that have one; not valid if none came.
  UniqueFd TakeFirst() { return fds.empty() ? UniqueFd() : std::move(fds.front()); }
};

// Sends one message. Waits for room.
absl::Status SendDescriptorMessage(int socket, std::string_view text,
                                   std::span<const int> fds = {});

// Receives one message. `flags` are recvmsg(2)'s; with MSG_DONTWAIT an error if there is none.
absl::StatusOr<DescriptorMessage> ReceiveDescriptorMessage(int socket, int flags = 0);

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_DESCRIPTOR_MESSAGE_H_
