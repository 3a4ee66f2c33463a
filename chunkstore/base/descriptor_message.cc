// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/descriptor_message.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace lamina {

absl::StatusOr<DescriptorMessage> ReceiveDescriptorMessage(int socket, int flags) {
  char text[kMaxDescriptorMessage];
  iovec data{text, sizeof(text)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr packet{};
  packet.msg_iov = &data;
  packet.msg_iovlen = 1;
  packet.msg_control = control;
  packet.msg_controllen = sizeof(control);
  ssize_t length = 0;
  do {
    length = ::recvmsg(socket, &packet, flags | MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length < 0) return ErrnoStatus(errno, "receive a message");
  DescriptorMessage message{.text = std::string(text, static_cast<size_t>(length)), .fd = {}};
  const cmsghdr* header = CMSG_FIRSTHDR(&packet);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    message.fd.Reset(fd);
  }
  return message;
}

}  // namespace lamina
