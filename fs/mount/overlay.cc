// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/overlay.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <utility>

#include "chunkstore/base/file.h"
#include "fs/mount/fs_context.h"
#include "fs/mount/mount.h"

namespace lamina::fs {

// The initial user namespace maps all of its 2^32 - 1 ids to themselves (user_namespaces(7)).
absl::StatusOr<bool> OverlayNeedsUserXattr() {
  constexpr const char* kMap = "/proc/self/uid_map";
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(kMap, O_RDONLY));
  char text[128];
  const ssize_t length = ::read(fd.get(), text, sizeof(text));
  if (length < 0) return ErrnoStatus(errno, fmt::format("read {}", kMap));
  uint64_t fields[3] = {};
  const char* at = text;
  for (uint64_t& field : fields) {
    while (at != text + length && *at == ' ') ++at;
    at = std::from_chars(at, text + length, field).ptr;
  }
  return fields[0] != 0 || fields[1] != 0 || fields[2] != UINT32_MAX;
}

absl::StatusOr<std::vector<std::string>> OverlayOptions() {
  std::vector<std::string> options = {"index=off", "metacopy=off", "nfs_export=off",
                                      "redirect_dir=nofollow"};
  ASSIGN_OR_RETURN(const bool user_xattr, OverlayNeedsUserXattr());
  if (user_xattr) options.emplace_back("userxattr");
  return options;
}

absl::Status CopyDirectoryAttributes(const std::string& from, const std::string& to) {
  struct stat root {};
  if (::stat(from.c_str(), &root) != 0 || ::chown(to.c_str(), root.st_uid, root.st_gid) != 0 ||
      ::chmod(to.c_str(), root.st_mode & 07777) != 0) {
    return ErrnoStatus(errno, fmt::format("give {} the attributes of {}", to, from));
  }
  const timespec modified[2] = {{.tv_sec = 0, .tv_nsec = UTIME_OMIT}, root.st_mtim};
  if (::utimensat(AT_FDCWD, to.c_str(), modified, 0) != 0) {
    return ErrnoStatus(errno, "set the time of " + to);
  }
  return absl::OkStatus();
}

static absl::StatusOr<std::vector<std::string>> OptionsOf(const OverlayDirectories& directories) {
  ASSIGN_OR_RETURN(std::vector<std::string> options, OverlayOptions());
  if (directories.is_volatile) options.emplace_back("volatile");
  return options;
}

absl::Status MountOverlayByLayer(const OverlayDirectories& directories, const std::string& target) {
  ASSIGN_OR_RETURN(FsContext context, FsContext::Open("overlay"));
  RETURN_IF_ERROR(context.SetString("source", "lamina"));
  for (const std::string& lower : directories.lowers) {
    const absl::Status status = context.SetPath("lowerdir+", lower);
    if (!status.ok() && context.error() == EINVAL)
      return absl::UnimplementedError(status.message());
    RETURN_IF_ERROR(status);
  }
  RETURN_IF_ERROR(context.SetPath("upperdir", directories.upper));
  RETURN_IF_ERROR(context.SetPath("workdir", directories.work));
  ASSIGN_OR_RETURN(const std::vector<std::string> options, OptionsOf(directories));
  for (const std::string& option : options) {
    const size_t equals = option.find('=');
    RETURN_IF_ERROR(equals == option.npos
                        ? context.SetFlag(option)
                        : context.SetString(option.substr(0, equals), option.substr(equals + 1)));
  }
  ASSIGN_OR_RETURN(const UniqueFd mount, context.Mount(0));
  return AttachMount(mount, target);
}

absl::Status MountOverlayByString(const OverlayDirectories& directories,
                                  const std::string& target) {
  // In mount data a comma ends an option and a colon a path, so paths are named by descriptors.
  std::vector<UniqueFd> fds;
  const auto path_of = [&](const std::string& directory) -> absl::StatusOr<std::string> {
    ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(directory, O_PATH | O_DIRECTORY));
    fds.push_back(std::move(fd));
    return fmt::format("/proc/self/fd/{}", fds.back().get());
  };
  std::string data = "lowerdir=";
  for (const std::string& lower : directories.lowers) {
    ASSIGN_OR_RETURN(const std::string path, path_of(lower));
    if (!data.ends_with('=')) data += ':';
    data += path;
  }
  ASSIGN_OR_RETURN(const std::string upper, path_of(directories.upper));
  ASSIGN_OR_RETURN(const std::string work, path_of(directories.work));
  data += fmt::format(",upperdir={},workdir={}", upper, work);
  ASSIGN_OR_RETURN(const std::vector<std::string> options, OptionsOf(directories));
  for (const std::string& option : options) data += "," + option;
  if (data.size() >= static_cast<size_t>(::sysconf(_SC_PAGESIZE))) {
    return absl::UnimplementedError(
        fmt::format("overlay: {} layers are more than this kernel takes (Linux 6.7 takes them)",
                    directories.lowers.size()));
  }
  if (::mount("lamina", target.c_str(), "overlay", 0, data.c_str()) != 0) {
    return ErrnoStatus(errno, "overlay: mount");
  }
  return absl::OkStatus();
}

absl::Status MountOverlay(const OverlayDirectories& directories, const std::string& target) {
  const std::string what = fmt::format("mount overlay at {}", target);
  if (directories.lowers.empty()) return absl::InvalidArgumentError(what + ": no lower directory");
  absl::Status status = MountOverlayByLayer(directories, target);
  if (absl::IsUnimplemented(status)) status = MountOverlayByString(directories, target);
  return Annotate(std::move(status), what);
}

}  // namespace lamina::fs
