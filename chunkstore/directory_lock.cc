// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/directory_lock.h"

#include <fcntl.h>

#include <filesystem>
#include <system_error>

namespace lamina::chunkstore {

absl::StatusOr<UniqueFd> LockDirectory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return ErrnoStatus(error.value(), "create directory " + directory);
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(directory, O_RDONLY | O_DIRECTORY));
  ASSIGN_OR_RETURN(const bool locked, TryLock(fd.get()), "lock directory {}", directory);
  if (locked) return fd;
  return absl::UnavailableError(
      fmt::format("directory {} is in use by another process", directory));
}

}  // namespace lamina::chunkstore
