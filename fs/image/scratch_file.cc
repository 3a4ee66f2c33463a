// SPDX-License-Identifier: Apache-2.0
#include "fs/image/scratch_file.h"

#include <fcntl.h>

#include <cstdlib>

namespace lamina::fs {

absl::StatusOr<UniqueFd> OpenScratch() {
  const char* directory = std::getenv("TMPDIR");
  // Not /tmp: it may be in memory.
  return OpenFile(directory != nullptr ? directory : "/var/tmp", O_TMPFILE | O_RDWR, 0600);
}

}  // namespace lamina::fs
