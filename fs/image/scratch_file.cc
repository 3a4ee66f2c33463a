// SPDX-License-Identifier: Apache-2.0
#include "fs/image/scratch_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>

namespace lamina::fs {
namespace {

std::string ScratchDirectory() {
  const char* const configured = std::getenv("TMPDIR");
  // Not /tmp: it may be in memory.
  return configured != nullptr && *configured != '\0' ? configured : "/var/tmp";
}

}  // namespace

std::string ScratchName() {
  return fmt::format("temporary file in {} (TMPDIR names another place)", ScratchDirectory());
}

absl::StatusOr<UniqueFd> OpenScratch() {
  const std::string directory = ScratchDirectory();
  UniqueFd fd(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  // What the kernel or a file system without O_TMPFILE says (open(2)): NFS, older overlayfs.
  if (!fd.valid() && (errno == EOPNOTSUPP || errno == EISDIR)) {
    std::string path = directory + "/lamina-XXXXXX";
    fd = UniqueFd(::mkostemp(path.data(), O_CLOEXEC));
    if (fd.valid()) ::unlink(path.c_str());
  }
  if (!fd.valid()) return ErrnoStatus(errno, "make a " + ScratchName());
  return fd;
}

}  // namespace lamina::fs
