// SPDX-License-Identifier: Apache-2.0
//
// Errors in Lamina are absl::Status. An error says what was being done, to what, and why it failed;
// each caller adds its own part in front on the way up, so that a user reads one line such as
// "mount app:1: layer sha256:ab12...: frame 7: digest mismatch".
#ifndef LAMINA_CHUNKSTORE_BASE_STATUS_H_
#define LAMINA_CHUNKSTORE_BASE_STATUS_H_

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace lamina {

// `status` with "context: " in front of its message; OK stays OK. The code is kept.
absl::Status Annotate(absl::Status status, std::string_view context);

// The status of a failed system call: code and text from `error` (an errno value), behind
// `context`.
absl::Status ErrnoStatus(int error, std::string_view context);

// errno for a status, for interfaces of the kernel (FUSE replies); EIO where nothing fits better.
int StatusToErrno(const absl::Status& status);

}  // namespace lamina

#define LAMINA_CONCAT_INNER(a, b) a##b
#define LAMINA_CONCAT(a, b) LAMINA_CONCAT_INNER(a, b)

// Returns from the current function if `expr` is not OK. The second form adds context; the context
// is a fmt format string with arguments, evaluated only on failure:
//   RETURN_IF_ERROR(file.Sync());
//   RETURN_IF_ERROR(file.Sync(), "write blob {}", digest);
#define RETURN_IF_ERROR(expr, ...)                                                            \
  do {                                                                                        \
    if (absl::Status lamina_status = (expr); !lamina_status.ok()) {                           \
      __VA_OPT__(lamina_status =                                                              \
                     ::lamina::Annotate(std::move(lamina_status), fmt::format(__VA_ARGS__));) \
      return lamina_status;                                                                   \
    }                                                                                         \
  } while (false)

// Assigns the value of a StatusOr to `lhs`, or returns its error, with context as above.
//   ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY), "blob {}", digest);
#define ASSIGN_OR_RETURN(lhs, expr, ...) \
  LAMINA_ASSIGN_OR_RETURN(LAMINA_CONCAT(lamina_or_, __LINE__), lhs, expr, __VA_ARGS__)
#define LAMINA_ASSIGN_OR_RETURN(tmp, lhs, expr, ...)                                        \
  auto tmp = (expr);                                                                        \
  if (!tmp.ok()) {                                                                          \
    absl::Status lamina_status = std::move(tmp).status();                                   \
    __VA_OPT__(lamina_status =                                                              \
                   ::lamina::Annotate(std::move(lamina_status), fmt::format(__VA_ARGS__));) \
    return lamina_status;                                                                   \
  }                                                                                         \
  lhs = std::move(tmp).value()

#endif  // LAMINA_CHUNKSTORE_BASE_STATUS_H_
