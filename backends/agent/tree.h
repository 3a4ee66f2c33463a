// SPDX-License-Identifier: Apache-2.0
//
// File trees on a stream of frames: one file, directory or symbolic link, with what is below it.
// Regular files, directories and symbolic links go over, with permissions and times; sockets,
// FIFOs and devices do not, and neither do owners, further hard links and attributes.
//
// Neither end trusts the other. The receiver makes files below a directory that it made or opened
// itself, never follows a symbolic link there, whoever made it, and refuses every path that leads
// elsewhere.
#ifndef LAMINA_BACKENDS_AGENT_TREE_H_
#define LAMINA_BACKENDS_AGENT_TREE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina::agent {

struct TreeCount {
  uint64_t entries = 0;
  uint64_t bytes = 0;    // of file content
  uint64_t skipped = 0;  // what is no file, directory or symbolic link
};

// Who the files are given to; without it, whoever receives them.
struct Owner {
  uint32_t uid = 0;
  uint32_t gid = 0;
};

struct ReceiveOptions {
  uint64_t max_bytes = uint64_t{64} << 30;
  uint64_t max_entries = 10'000'000;
  std::optional<Owner> owner;
};

// Sends what is at `path`, a symbolic link as one. What changes or goes meanwhile is sent as it is
// found. Ends with kTreeEnd.
absl::StatusOr<TreeCount> SendTree(int socket, const std::string& path);

// The same for one regular file of the given content.
absl::Status SendFile(int socket, std::string_view content, uint32_t mode);

// Receives up to kTreeEnd and makes `path` of it, in an existing directory. A file replaces what is
// there unless that is a directory; a directory goes into one that is there. Set-user-id bits are
// dropped. kResourceExhausted over a limit, kInvalidArgument for what is not allowed; what was made
// until then stays. An error of the sender (kError) is returned.
absl::StatusOr<TreeCount> ReceiveTree(int socket, const std::string& path,
                                      const ReceiveOptions& options);

// Receives one regular file into memory; kFailedPrecondition if it is something else.
absl::StatusOr<std::string> ReceiveFile(int socket, uint64_t max_bytes);

// OK if `path` is relative and each of its parts is a name: not empty, "." or "..", and no zero
// byte in it. The empty path is OK: the root.
absl::Status CheckRelativePath(std::string_view path);

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_TREE_H_
