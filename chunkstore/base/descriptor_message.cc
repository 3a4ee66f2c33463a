// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/descriptor_message.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace lamina {

absl::Status SendDescriptorMessage(int socket, std::string_view text, std::span<const int> fds) {
  if (fds.size() > kMaxDescriptors) return absl::InvalidArgumentError("too many descriptors");
  iovec data{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr packet{};
  packet.msg_iov = &data;
  packet.msg_iovlen = 1;
  if (!fds.empty()) {
    packet.msg_control = control;
    packet.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&packet);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  while (::sendmsg(socket, &packet, MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) return ErrnoStatus(errno, "send a message");
  }
  return absl::OkStatus();
}

absl::StatusOr<DescriptorMessage> ReceiveDescriptorMessage(int socket, int flags) {
  char text[kMaxDescriptorMessage];
  iovec data{text, sizeof(text)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
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
  DescriptorMessage message{.text = std::string(text, static_cast<size_t>(length)), .fds = {}};
  for (cmsghdr* header = CMSG_FIRSTHDR(&packet); header != nullptr;
       header = CMSG_NXTHDR(&packet, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    // The kernel has opened as many as there is room for, padding included.
    for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= header->cmsg_len; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header) + i * sizeof(number), sizeof(number));
      UniqueFd fd(number);
      if (message.fds.size() < kMaxDescriptors) message.fds.push_back(std::move(fd));
    }
  }
  return message;
}

}  // namespace lamina
