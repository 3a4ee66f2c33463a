// SPDX-License-Identifier: Apache-2.0
//
// What goes between the pool, its slots and their jails for one call: packets on a socket, the call's
// descriptors with them. All of these processes are this program's own.
#ifndef LAMINA_BACKENDS_FNCALL_CALL_H_
#define LAMINA_BACKENDS_FNCALL_CALL_H_

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "backends/agent/program.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fncall {

// Order: standard streams; the request (an encoded ExecMessage) and the place for its files that come
// back, both in memory (memfd).
struct CallDescriptors {
  static constexpr size_t kCount = 5;
  UniqueFd in;
  UniqueFd out;
  UniqueFd err;
  UniqueFd request;
  UniqueFd result;
};

enum class Order : uint8_t { kCall = 1, kKill = 2, kSignal = 3 };
struct Packet {
  Order order = Order::kCall;
  uint8_t signal = 0;
};

// How a call ended. What is not of its program's making is `failed_errno`: the jail was not there.
struct Report {
  int32_t failed_errno = 0;
  agent::StartFailure start;
  int32_t wait_status = 0;  // as wait4(2) has it
  uint64_t wall_us = 0;
  uint64_t cpu_us = 0;
  uint64_t peak_bytes = 0;
  uint64_t memory_kills = 0;
};

struct SocketPair {
  UniqueFd ours;
  UniqueFd theirs;
};
absl::StatusOr<SocketPair> MakeSocketPair();

absl::Status SendCall(int socket, const CallDescriptors& descriptors);
absl::Status SendOrder(int socket, Order order, uint8_t signal = 0);
// One packet; with kCall come the descriptors. kUnavailable if the other end is gone,
// kResourceExhausted if not all of them came.
absl::StatusOr<std::pair<Packet, CallDescriptors>> ReceivePacket(int socket);

absl::Status SendReport(int socket, const Report& report);
absl::StatusOr<Report> ReceiveReport(int socket);

}  // namespace lamina::fncall

#endif  // LAMINA_BACKENDS_FNCALL_CALL_H_
