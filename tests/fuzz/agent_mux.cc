// SPDX-License-Identifier: Apache-2.0
//
// A stream of connections from a guest that says anything: its host ends with an error and keeps no more
// than it promised, and so does a guest whose host does.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>

#include "backends/agent/mux.h"

namespace {

using lamina::UniqueFd;
using lamina::agent::Mux;

void Require(bool condition) {
  if (!condition) std::abort();
}

std::array<UniqueFd, 2> Pair() {
  int ends[2];
  Require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

}  // namespace

// The first byte says which side it is.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMost = 100'000;  // what fits into the socket
  if (size < 1 || size > kMost) return 0;
  const bool host = (data[0] & 1) != 0;
  auto [ours, theirs] = Pair();
  auto mux = Mux::Create(host ? Mux::Side::kHost : Mux::Side::kGuest, std::move(ours),
                         {.opened = [](UniqueFd) {}});
  Require(mux.ok());
  auto [client, served] = Pair();
  if (host) (*mux)->Open(std::move(served));
  Require(::write(theirs.get(), data + 1, size - 1) == static_cast<ssize_t>(size - 1));
  ::shutdown(theirs.get(), SHUT_WR);
  Require(!(*mux)->Run().ok());
  return 0;
}
