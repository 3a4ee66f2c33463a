// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "chunkstore/base/file.h"

namespace lamina {
namespace {

struct OutputPlace {
  std::string path;
  bool replaced;  // the file there is; otherwise it is written
};

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

absl::StatusOr<OutputPlace> FindOutputPlace(const std::string& path) {
  struct stat info {};
  const bool exists = ::stat(path.c_str(), &info) == 0;
  if (!exists && errno != ENOENT) return ErrnoStatus(errno, "write " + path);
  if (exists && S_ISDIR(info.st_mode)) return ErrnoStatus(EISDIR, "write " + path);
  if (exists && !S_ISREG(info.st_mode)) return OutputPlace{path, /*replaced=*/false};
  constexpr int kMaxLinks = 40;  // as the kernel follows
  std::filesystem::path target = path;
  std::error_code error;
  for (int link = 0; std::filesystem::is_symlink(target, error); ++link) {
    if (link == kMaxLinks) return ErrnoStatus(ELOOP, "write " + path);
    const std::filesystem::path next = std::filesystem::read_symlink(target, error);
    if (error) return ErrnoStatus(error.value(), "read link " + target.string());
    target = target.parent_path() / next;
  }
  // proc(5): links to descriptors lead to files that may have no name.
  struct stat found {};
  const bool named = ::lstat(target.c_str(), &found) == 0;
  if (exists && !(named && SameFile(info, found))) return OutputPlace{path, /*replaced=*/false};
  return OutputPlace{target.string(), /*replaced=*/true};
}

// Of what may have no offsets.
absl::Status WriteAll(int fd, std::string_view content) {
  while (!content.empty()) {
    const ssize_t put = ::write(fd, content.data(), content.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return ErrnoStatus(errno, fmt::format("write {} bytes", content.size()));
    content.remove_prefix(static_cast<size_t>(put));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteOutputFile(const std::string& path, std::string_view content, uint32_t mode) {
  ASSIGN_OR_RETURN(const OutputPlace place, FindOutputPlace(path));
  if (place.replaced) return WriteFileAtomically(place.path, content, mode);
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(place.path, O_WRONLY | O_TRUNC | O_NOCTTY));
  return Annotate(WriteAll(fd.get(), content), "write " + path);
}

absl::Status CheckOutputFile(const std::string& path) {
  ASSIGN_OR_RETURN(const OutputPlace place, FindOutputPlace(path));
  if (!place.replaced) {
    // Opened it would wait for a FIFO's reader.
    return ::access(path.c_str(), W_OK) == 0 ? absl::OkStatus()
                                             : ErrnoStatus(errno, "write " + path);
  }
  std::string temporary = place.path + ".XXXXXX";
  const UniqueFd fd(::mkostemp(temporary.data(), O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "create " + temporary);
  ::unlink(temporary.c_str());
  return absl::OkStatus();
}

}  // namespace lamina
