// SPDX-License-Identifier: Apache-2.0
#include "backends/fncall/call.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace lamina::fncall {
namespace {

absl::Status Send(int socket, const void* bytes, size_t size, const std::array<int, 5>* fds) {
  iovec part{const_cast<void*>(bytes), size};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(*fds))> control{};
  msghdr message{.msg_iov = &part, .msg_iovlen = 1};
  if (fds != nullptr) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(*fds));
    std::memcpy(CMSG_DATA(header), fds->data(), sizeof(*fds));
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return ErrnoStatus(errno, "send to a jail");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SocketPair> MakeSocketPair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return ErrnoStatus(errno, "socketpair");
  }
  return SocketPair{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

absl::Status SendCall(int socket, const CallDescriptors& d) {
  const std::array<int, 5> fds{d.in.get(), d.out.get(), d.err.get(), d.request.get(),
                               d.result.get()};
  const Packet packet{.order = Order::kCall};
  return Send(socket, &packet, sizeof(packet), &fds);
}

absl::Status SendOrder(int socket, Order order, uint8_t signal) {
  const Packet packet{.order = order, .signal = signal};
  return Send(socket, &packet, sizeof(packet), nullptr);
}

absl::StatusOr<std::pair<Packet, CallDescriptors>> ReceivePacket(int socket) {
  std::pair<Packet, CallDescriptors> received;
  iovec part{&received.first, sizeof(Packet)};
  std::array<int, CallDescriptors::kCount> fds{-1, -1, -1, -1, -1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(fds))> control{};
  msghdr message{.msg_iov = &part,
                 .msg_iovlen = 1,
                 .msg_control = control.data(),
                 .msg_controllen = control.size()};
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return ErrnoStatus(errno, "receive a call");
  if (got == 0) return absl::UnavailableError("the other end is gone");
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(fds))) {
    std::memcpy(fds.data(), CMSG_DATA(header), sizeof(fds));
  }
  CallDescriptors& d = received.second;
  d.in.Reset(fds[0]);
  d.out.Reset(fds[1]);
  d.err.Reset(fds[2]);
  d.request.Reset(fds[3]);
  d.result.Reset(fds[4]);
  return received;
}

absl::Status SendReport(int socket, const Report& report) {
  return Send(socket, &report, sizeof(report), nullptr);
}

absl::StatusOr<Report> ReceiveReport(int socket) {
  Report report;
  ssize_t got = 0;
  do {
    got = ::recv(socket, &report, sizeof(report), 0);
  } while (got < 0 && errno == EINTR);
  if (got == 0) return absl::UnavailableError("the other end is gone");
  if (got != sizeof(report)) return ErrnoStatus(errno, "receive a report");
  return report;
}

}  // namespace lamina::fncall
