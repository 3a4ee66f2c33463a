// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/directory_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace lamina::chunkstore {

absl::StatusOr<UniqueFd> LockDirectory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return ErrnoStatus(error.value(), "create directory " + directory);
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(directory, O_RDONLY | O_DIRECTORY));
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) return fd;
  if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "lock directory " + directory);
  return absl::UnavailableError(
      fmt::format("directory {} is in use by another process", directory));
}

}  // namespace lamina::chunkstore
