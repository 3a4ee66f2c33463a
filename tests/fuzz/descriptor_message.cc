// SPDX-License-Identifier: Apache-2.0
//
// Messages that bring descriptors along: whatever comes, and however many, some are given out and none
// stays open.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "chunkstore/base/descriptor_message.h"

namespace {

constexpr size_t kMostSent = lamina::kMaxDescriptors + 2;

void Require(bool condition) {
  if (!condition) std::abort();
}

// The lowest number that is free.
int FreeDescriptor() {
  const int fd = ::dup(STDERR_FILENO);
  Require(fd >= 0);
  ::close(fd);
  return fd;
}

void Send(int socket, std::string_view text, size_t descriptors) {
  std::array<int, kMostSent> fds{};
  fds.fill(STDERR_FILENO);
  iovec data{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
  msghdr packet{};
  packet.msg_iov = &data;
  packet.msg_iovlen = 1;
  if (descriptors > 0) {
    packet.msg_control = control;
    packet.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&packet);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), descriptors * sizeof(int));
  }
  Require(::sendmsg(socket, &packet, 0) == static_cast<ssize_t>(text.size()));
}

}  // namespace

// The first byte says how many descriptors come, the others are the text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t descriptors = data[0] % (kMostSent + 1);
  const std::string_view text(reinterpret_cast<const char*>(data + 1),
                              std::min<size_t>(size - 1, 2 * lamina::kMaxDescriptorMessage));
  int ends[2];
  Require(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const lamina::UniqueFd ours(ends[0]);
  const lamina::UniqueFd theirs(ends[1]);
  const int free = FreeDescriptor();
  Send(theirs.get(), text, descriptors);
  {
    const auto message = lamina::ReceiveDescriptorMessage(ours.get());
    Require(message.ok() && message->text == text.substr(0, lamina::kMaxDescriptorMessage));
    Require(message->fds.size() == std::min(descriptors, lamina::kMaxDescriptors));
    for (const lamina::UniqueFd& fd : message->fds) {
      Require((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
    }
  }
  Require(FreeDescriptor() == free);
  return 0;
}
