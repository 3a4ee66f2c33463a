// SPDX-License-Identifier: Apache-2.0
//
// Unix stream sockets that carry one line each way.
#ifndef LAMINA_FS_ENGINE_SOCKET_H_
#define LAMINA_FS_ENGINE_SOCKET_H_

#include <sys/types.h>

#include <chrono>
#include <string>
#include <string_view>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

// The engine's socket in its state directory.
inline constexpr const char* kControlSocket = "control.sock";
// Longer lines are refused on both sides.
inline constexpr size_t kMaxLine = 16 << 20;

// A listening socket `<directory>/<name>`, mode 0600; an old one of that name is replaced, anything else
// there is kAlreadyExists. The directory's path may be longer than the 107 bytes that sockaddr_un allows.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& directory, const std::string& name);
// Fails as ListenUnix would, as far as that can be known without listening.
absl::Status CheckListenUnix(const std::string& directory, const std::string& name);
// kNotFound if there is no such group.
absl::StatusOr<gid_t> FindGroup(const std::string& group);
// Lets members of a group connect as well (mode 0660).
absl::Status AllowGroup(const std::string& socket_path, const std::string& group);
// kUnavailable if nothing listens there; kDeadlineExceeded if somebody does, and has not taken those
// who came before for `patience`.
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& directory, const std::string& name,
                                     std::chrono::milliseconds patience = std::chrono::minutes(1));
// Bounds each send and each receive of a socket, which fail with EAGAIN then; 0: they wait for ever.
absl::Status SetSocketPatience(int socket, std::chrono::milliseconds patience);

// Accepts a connection of a listening socket that is ready. Not valid if its client has gone meanwhile.
// An error, as for want of descriptors, comes after a pause: the connection stays in the queue, and
// whoever polls the socket must not do nothing else.
absl::StatusOr<UniqueFd> AcceptUnix(int listener);

// One line without its newline; kUnavailable if the other side closes before it is complete.
absl::StatusOr<std::string> ReadLine(int socket);
absl::Status WriteLine(int socket, std::string_view line);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_SOCKET_H_
