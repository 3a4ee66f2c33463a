// SPDX-License-Identifier: Apache-2.0
#include "backends/sandbox_directory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>

#include "backends/cgroup.h"
#include "chunkstore/base/file.h"
#include "fs/engine/client.h"
#include "fs/engine/messages.h"
#include "fs/mount/loop.h"
#include "fs/mount/mount.h"

namespace lamina::backends {
namespace {

// Runs a program of this machine to its end; what it says goes into the error.
absl::Status RunProgram(const std::vector<std::string>& words) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd output(ends[0]);
  UniqueFd input(ends[1]);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t child = ::fork();
  if (child < 0) return ErrnoStatus(errno, "fork");
  if (child == 0) {
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    ::dup2(null, STDIN_FILENO);
    ::dup2(input.get(), STDOUT_FILENO);
    ::dup2(input.get(), STDERR_FILENO);
    ::execvp(arguments[0], arguments.data());
    ::_exit(errno == ENOENT ? 127 : 126);
  }
  input.Reset();
  std::string said;
  std::array<char, 4096> piece;
  while (true) {
    const ssize_t got = ::read(output.get(), piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    if (said.size() < piece.size()) said.append(piece.data(), static_cast<size_t>(got));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status == 0) return absl::OkStatus();
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    return absl::FailedPreconditionError(fmt::format("{} is not on PATH", words[0]));
  }
  while (said.ends_with('\n')) said.pop_back();
  return absl::InternalError(fmt::format("{}: {}", words[0], said));
}

absl::Status MakeDirectory(const std::string& path, mode_t mode) {
  if (::mkdir(path.c_str(), mode) != 0) return ErrnoStatus(errno, "make directory " + path);
  return absl::OkStatus();
}

absl::Status MountDisk(const std::string& directory, uint64_t bytes) {
  const std::string image = directory + "/disk.img";
  RETURN_IF_ERROR(MakeDiskImage(image, bytes));
  ASSIGN_OR_RETURN(const fs::LoopDevice loop, fs::LoopDevice::Attach(image, /*writable=*/true));
  const std::string disk = directory + "/disk";
  if (::mount(loop.path().c_str(), disk.c_str(), "ext4", MS_NOATIME | MS_NOSUID | MS_NODEV,
              nullptr) != 0) {
    return ErrnoStatus(errno, fmt::format("mount {} on {}", loop.path(), disk));
  }
  return absl::OkStatus();
}

}  // namespace

std::string SandboxesDirectory(const LauncherOptions& options) {
  return options.state + "/sandboxes";
}
std::string SnapshotsDirectory(const LauncherOptions& options) {
  return options.state + "/sandbox-snapshots";
}

absl::Status MakeDiskImage(const std::string& path, uint64_t bytes) {
  constexpr uint64_t kLeast = 4 << 20;
  if (bytes < kLeast) {
    return absl::InvalidArgumentError(fmt::format("a disk has {} bytes at least", kLeast));
  }
  {
    ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(path, O_RDWR | O_CREAT | O_EXCL, 0600));
    if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
      return ErrnoStatus(errno, "make " + path);
    }
  }
  // No journal and no reserve: it lives no longer than its sandbox.
  return RunProgram({"mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", "-m", "0", "-E",
                     "lazy_itable_init=1,nodiscard,root_owner=0:0", path});
}

namespace {

absl::StatusOr<fs::MountDescription> MountAt(const LauncherOptions& options,
                                             const std::string& directory,
                                             fs::MountRequest request) {
  request.target = directory + "/rootfs";
  RETURN_IF_ERROR(MakeDirectory(request.target, 0755));
  fs::Client client(options.state, options.program, options.engine_options);
  ASSIGN_OR_RETURN(const nlohmann::json mount, client.Mount(request));
  return fs::ParseMountDescription(mount);
}

}  // namespace

absl::StatusOr<fs::MountDescription> MountImage(const LauncherOptions& options,
                                                const std::string& directory, const Record& record,
                                                const registry::Settings& registry) {
  return MountAt(options, directory, {.image = record.image, .registry = registry});
}

absl::StatusOr<fs::MountDescription> MountRootfs(const LauncherOptions& options,
                                                 const std::string& directory, const Record& record,
                                                 const registry::Settings& registry,
                                                 const std::string& upper_from,
                                                 uint64_t disk_bytes) {
  const std::string disk = directory + "/disk";
  RETURN_IF_ERROR(MakeDirectory(disk, 0700));
  if (disk_bytes > 0) {
    RETURN_IF_ERROR(MountDisk(directory, disk_bytes), "disk of {} bytes", disk_bytes);
  }
  if (!upper_from.empty()) RETURN_IF_ERROR(CopyUpper(upper_from, disk + "/upper"));
  return MountAt(
      options, directory,
      {.image = record.image, .writable = true, .writable_dir = disk, .registry = registry});
}

absl::Status RemoveSandbox(const LauncherOptions& options, const std::string& directory) {
  const std::string id = directory.substr(directory.rfind('/') + 1);
  ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Of("lamina/" + id));
  RETURN_IF_ERROR(group.Remove());
  const std::string rootfs = directory + "/rootfs";
  ASSIGN_OR_RETURN(const auto mounted, fs::FindMount(rootfs));
  if (mounted.has_value()) {
    fs::Client client(options.state, options.program, options.engine_options);
    const absl::Status unmounted = client.Unmount(rootfs);
    // Of an engine that is gone.
    if (!unmounted.ok() && ::umount2(rootfs.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) != 0 &&
        errno != EINVAL && errno != ENOENT) {
      return unmounted;
    }
  }
  const std::string disk = directory + "/disk";
  ASSIGN_OR_RETURN(const auto disk_mounted, fs::FindMount(disk));
  if (disk_mounted.has_value() && ::umount2(disk.c_str(), UMOUNT_NOFOLLOW) != 0 &&
      ::umount2(disk.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) != 0) {
    return ErrnoStatus(errno, "unmount " + disk);
  }
  // A mount on rootfs keeps it, so that nothing is ever removed through one.
  if (::rmdir(rootfs.c_str()) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, "remove " + rootfs);
  }
  std::error_code error;
  std::filesystem::remove_all(directory, error);
  if (error) return absl::InternalError(fmt::format("remove {}: {}", directory, error.message()));
  return absl::OkStatus();
}

absl::Status CopyUpper(const std::string& from, const std::string& to) {
  return RunProgram({"cp", "--archive", "--reflink=auto", "--sparse=always",
                     "--no-target-directory", "--one-file-system", "--", from, to});
}

uint64_t DiskUsage(const std::string& directory) {
  constexpr uint64_t kBlock = 512;
  uint64_t bytes = 0;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator entry(directory, error), end;
       !error && entry != end; entry.increment(error)) {
    struct stat info {};
    if (::lstat(entry->path().c_str(), &info) == 0) {
      bytes += static_cast<uint64_t>(info.st_blocks) * kBlock;
    }
  }
  return bytes;
}

}  // namespace lamina::backends
