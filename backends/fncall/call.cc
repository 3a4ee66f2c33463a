// SPDX-License-Identifier: Apache-2.0
#include "backends/fncall/call.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <span>
#include <string_view>

#include "chunkstore/base/descriptor_message.h"

namespace lamina::fncall {
namespace {

template <typename T>
std::string_view BytesOf(const T& value) {
  return AsText(std::as_bytes(std::span(&value, 1)));
}

// A message that has a T, and what came with it.
template <typename T>
absl::StatusOr<DescriptorMessage> Receive(int socket, T& value) {
  ASSIGN_OR_RETURN(DescriptorMessage message, ReceiveDescriptorMessage(socket));
  if (message.text.empty()) return absl::UnavailableError("the other end is gone");
  if (message.text.size() != sizeof(T)) return absl::InternalError("a message of another size");
  std::memcpy(&value, message.text.data(), sizeof(T));
  return message;
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
  const std::array<int, CallDescriptors::kCount> fds{d.in.get(), d.out.get(), d.err.get(),
                                                     d.request.get(), d.result.get()};
  return SendDescriptorMessage(socket, BytesOf(Packet{.order = Order::kCall}), fds);
}

absl::Status SendOrder(int socket, Order order, uint8_t signal) {
  return SendDescriptorMessage(socket, BytesOf(Packet{.order = order, .signal = signal}));
}

absl::StatusOr<std::pair<Packet, CallDescriptors>> ReceivePacket(int socket) {
  std::pair<Packet, CallDescriptors> received;
  ASSIGN_OR_RETURN(DescriptorMessage message, Receive(socket, received.first), "receive a call");
  if (received.first.order != Order::kCall) return received;
  if (message.fds.size() != CallDescriptors::kCount) {
    return absl::ResourceExhaustedError(
        fmt::format("receive a call: {} of its descriptors came", message.fds.size()));
  }
  CallDescriptors& d = received.second;
  d.in = std::move(message.fds[0]);
  d.out = std::move(message.fds[1]);
  d.err = std::move(message.fds[2]);
  d.request = std::move(message.fds[3]);
  d.result = std::move(message.fds[4]);
  return received;
}

absl::Status SendReport(int socket, const Report& report) {
  return SendDescriptorMessage(socket, BytesOf(report));
}

absl::StatusOr<Report> ReceiveReport(int socket) {
  Report report;
  RETURN_IF_ERROR(Receive(socket, report).status(), "receive a report");
  return report;
}

}  // namespace lamina::fncall
