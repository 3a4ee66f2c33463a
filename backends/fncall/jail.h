// SPDX-License-Identifier: Apache-2.0
//
// Jails: where one call runs, and nothing after it. A jail is the first process of new namespaces (PID,
// mount, network, IPC, UTS, cgroup) with a /proc, /tmp and loopback device of their own, on the image
// as it is, read-only. The call's process is its child, in a user namespace that owns none of these,
// under an id of its own, without privileges and behind a system call filter. When it ends, the jail
// kills what it left, says how it went, and ends; with it goes all else.
#ifndef LAMINA_BACKENDS_FNCALL_JAIL_H_
#define LAMINA_BACKENDS_FNCALL_JAIL_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "backends/fncall/call.h"
#include "backends/fncall/filter.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fncall {

struct JailOptions {
  std::string rootfs;      // the mounted image, writable: missing mount points are made
  uint64_t tmp_bytes = 0;  // size of /tmp
  uint32_t host_uid = 0;   // of the call's process, also its group
  const Filter* filter = nullptr;
};

// What programs in jails are, as they see it themselves.
inline constexpr uint32_t kInsideId = 1000;

// Gives this process a mount namespace whose root is the image, with /dev made and all of it
// read-only: what jails are cloned from.
absl::Status EnterImage(const JailOptions& options);

// A jail that waits for its call.
class Jail {
 public:
  // In a process that has entered the image. kUnavailable and the like if the kernel has no room.
  static absl::StatusOr<Jail> Prepare(const JailOptions& options);
  Jail(Jail&& other) noexcept
      : process_(std::exchange(other.process_, 0)), socket_(std::move(other.socket_)) {}
  Jail& operator=(Jail&&) = delete;
  // Kills it, and waits until all that was in it is dead.
  ~Jail();

  // Reports come here, orders and the call go there.
  int socket() const { return socket_.get(); }
  void Kill();
  // Waits until all that was in it is dead.
  void WaitForEnd();

 private:
  Jail(pid_t process, UniqueFd socket) : process_(process), socket_(std::move(socket)) {}

  pid_t process_;
  UniqueFd socket_;
};

}  // namespace lamina::fncall

#endif  // LAMINA_BACKENDS_FNCALL_JAIL_H_
