// SPDX-License-Identifier: Apache-2.0
//
// Descriptors that someone else keeps for the next process: laminad's supervisor, or systemd. Both
// are spoken to in systemd's protocol: descriptors come as sd_listen_fds(3) describes and are given
// away as sd_notify(3) does (FDSTORE=1, FDSTOREREMOVE=1).
#ifndef LAMINA_FS_ENGINE_DESCRIPTOR_HOLDER_H_
#define LAMINA_FS_ENGINE_DESCRIPTOR_HOLDER_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

// A connected socket on which sd_notify(3) messages are sent, each with descriptors or without.
// Thread-safe. What was sent arrives even if the sender is killed right afterwards.
class NotifySocket {
 public:
  // The socket that $NOTIFY_SOCKET names; an object that sends nothing if it is not set.
  static absl::StatusOr<NotifySocket> FromEnvironment();
  explicit NotifySocket(UniqueFd socket = UniqueFd()) : socket_(std::move(socket)) {}

  bool valid() const { return socket_.valid(); }
  // `fd`, if not negative, goes with the message; the receiver gets a duplicate.
  absl::Status Send(std::string_view message, int fd = -1) const;
  // Has the receiver keep a descriptor, or let go of it. A name is at most 255 printable characters
  // without ':'.
  absl::Status Store(const std::string& name, int fd) const;
  absl::Status Remove(const std::string& name) const;

 private:
  UniqueFd socket_;
};

// The descriptors that this process was started with (LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES), all
// close-on-exec, with their names; several may have one name. The variables are unset.
absl::StatusOr<std::multimap<std::string, UniqueFd>> InheritedDescriptors();

// Thread-safe.
class DescriptorHolder {
 public:
  // Of `descriptors` one may be called kNotifyName: it is what to send on then, and `notify` is not
  // used.
  static constexpr char kNotifyName[] = "notify";
  DescriptorHolder(std::multimap<std::string, UniqueFd> descriptors, NotifySocket notify);

  // Gives away a descriptor that was there at the start; not valid if there is none of this name,
  // or none any more.
  UniqueFd Take(const std::string& name);
  // All of the name, in the order in which they came.
  std::vector<UniqueFd> TakeAll(const std::string& name);
  // Those that nobody took.
  std::vector<std::string> names() const;

  // Of this process there is a successor: it will find the descriptor under this name.
  absl::Status Store(const std::string& name, int fd) const { return notify_.Store(name, fd); }
  // The successor will not find it, and the holder's duplicate is closed.
  absl::Status Remove(const std::string& name) const { return notify_.Remove(name); }
  // Says that this process now does its work.
  absl::Status Ready() const { return notify_.Send("READY=1"); }

 private:
  mutable std::mutex mutex_;
  std::multimap<std::string, UniqueFd> descriptors_;
  NotifySocket notify_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_DESCRIPTOR_HOLDER_H_
