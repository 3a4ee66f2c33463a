// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/directory_names.h"

#include <dirent.h>
#include <fcntl.h>

#include <cerrno>
#include <memory>
#include <string_view>

#include "chunkstore/base/file.h"

namespace lamina {

absl::StatusOr<std::vector<std::string>> DirectoryNames(int directory) {
  // A position of its own, at the beginning.
  UniqueFd again(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!again.valid()) return ErrnoStatus(errno, "open directory");
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::fdopendir(again.get()), ::closedir);
  if (entries == nullptr) return ErrnoStatus(errno, "read directory");
  again.Release();
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(entries.get());
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) return ErrnoStatus(errno, "read directory");
  return names;
}

}  // namespace lamina
