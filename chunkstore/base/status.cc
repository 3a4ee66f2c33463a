// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/status.h"

#include <cerrno>
#include <string>

namespace lamina {

absl::Status Annotate(absl::Status status, std::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), fmt::format("{}: {}", context, std::string(status.message())));
}

absl::Status ErrnoStatus(int error, std::string_view context) {
  return absl::ErrnoToStatus(error, std::string(context));
}

int StatusToErrno(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 0;
    case absl::StatusCode::kNotFound:
      return ENOENT;
    case absl::StatusCode::kPermissionDenied:
      return EACCES;
    case absl::StatusCode::kInvalidArgument:
      return EINVAL;
    case absl::StatusCode::kUnimplemented:
      return EOPNOTSUPP;
    default:
      // Full disks and exhausted memory included: the reader of an image must not see ENOSPC, which
      // programs take for a failed write of their own.
      return EIO;
  }
}

}  // namespace lamina
