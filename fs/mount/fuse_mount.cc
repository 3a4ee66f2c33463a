// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/fuse_mount.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "chunkstore/base/descriptor_message.h"
#include "fs/mount/fs_context.h"

namespace lamina::fs {
namespace {

constexpr const char* kFusermount = "fusermount3";
// Where fusermount3 finds the socket that it sends the descriptor over, by libfuse's convention.
constexpr const char* kSocketVariable = "_FUSE_COMMFD";

absl::StatusOr<UniqueFd> MountAsRoot(const FuseMountOptions& options) {
  ASSIGN_OR_RETURN(UniqueFd device, OpenFile("/dev/fuse", O_RDWR));
  ASSIGN_OR_RETURN(FsContext context, FsContext::Open("fuse"));
  RETURN_IF_ERROR(context.SetString("source", options.source));
  RETURN_IF_ERROR(context.SetString("subtype", options.subtype));
  RETURN_IF_ERROR(context.SetString("fd", fmt::format("{}", device.get())));
  RETURN_IF_ERROR(context.SetString("rootmode", fmt::format("{:o}", unsigned{S_IFDIR})));
  RETURN_IF_ERROR(context.SetString("user_id", fmt::format("{}", ::geteuid())));
  RETURN_IF_ERROR(context.SetString("group_id", fmt::format("{}", ::getegid())));
  RETURN_IF_ERROR(context.SetFlag("default_permissions"));
  RETURN_IF_ERROR(context.SetFlag("ro"));
  if (options.allow_other) RETURN_IF_ERROR(context.SetFlag("allow_other"));
  unsigned attributes = MOUNT_ATTR_RDONLY;
  if (!options.privileged_files) attributes |= MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
  ASSIGN_OR_RETURN(const UniqueFd mount, context.Mount(attributes));
  RETURN_IF_ERROR(AttachMount(mount, options.mountpoint));
  return device;
}

// Runs fusermount3 with `arguments`; `socket`, if not negative, is inherited and named to it.
absl::Status RunFusermount(std::vector<std::string> arguments, int socket) {
  RETURN_IF_ERROR(CheckFusermount());
  const UniqueFd output(::memfd_create("fusermount3", MFD_CLOEXEC));
  if (!output.valid()) return ErrnoStatus(errno, "memfd_create");

  arguments.insert(arguments.begin(), kFusermount);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  std::string variable = fmt::format("{}={}", kSocketVariable, socket);
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  if (socket >= 0) environment.push_back(variable.data());
  environment.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, output.get(), STDERR_FILENO);
  // Onto itself: clears close-on-exec (posix_spawn_file_actions_adddup2(3), glibc 2.29).
  if (socket >= 0) ::posix_spawn_file_actions_adddup2(&actions, socket, socket);
  pid_t pid = -1;
  const int error =
      ::posix_spawnp(&pid, kFusermount, &actions, nullptr, argv.data(), environment.data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, fmt::format("start {}", kFusermount));

  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return ErrnoStatus(errno, fmt::format("wait for {}", kFusermount));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  std::string said(4096, '\0');
  const ssize_t length = ::pread(output.get(), said.data(), said.size(), 0);
  said.resize(length > 0 ? static_cast<size_t>(length) : 0);
  while (said.ends_with('\n')) said.pop_back();
  return absl::FailedPreconditionError(
      said.empty() ? fmt::format("{} failed (wait status {:#x})", kFusermount, status) : said);
}

absl::StatusOr<UniqueFd> ReceiveDescriptor(int socket) {
  ASSIGN_OR_RETURN(DescriptorMessage message, ReceiveDescriptorMessage(socket), "{}", kFusermount);
  UniqueFd fd = message.TakeFirst();
  if (fd.valid()) return fd;
  return absl::InternalError(fmt::format("{} sent no descriptor", kFusermount));
}

// `text` for a comma-separated list of fusermount3's.
std::string EscapeOption(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == ',' || c == '\\') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

absl::StatusOr<UniqueFd> MountAsUser(const FuseMountOptions& options) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus(errno, "socketpair");
  }
  const UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  const std::string list = fmt::format("ro,nosuid,nodev,default_permissions,fsname={},subtype={}{}",
                                       EscapeOption(options.source), EscapeOption(options.subtype),
                                       options.allow_other ? ",allow_other" : "");
  RETURN_IF_ERROR(RunFusermount({"-o", list, "--", options.mountpoint}, theirs.get()));
  theirs.Reset();  // so that a missing message is an end of file
  return ReceiveDescriptor(ours.get());
}

}  // namespace

absl::StatusOr<UniqueFd> MountFuse(const FuseMountOptions& options) {
  auto device = ::geteuid() == 0 ? MountAsRoot(options) : MountAsUser(options);
  if (!device.ok()) {
    return Annotate(device.status(), fmt::format("mount FUSE at {}", options.mountpoint));
  }
  return device;
}

bool MayAllowOther() {
  if (::geteuid() == 0) return true;
  constexpr uint64_t kMaxConfig = 1 << 20;
  const auto config = ReadFileToString("/etc/fuse.conf", kMaxConfig);
  if (!config.ok()) return false;
  std::string_view rest = *config;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) {
      line.remove_suffix(1);
    }
    if (line == "user_allow_other") return true;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return false;
}

absl::Status UnmountFuseAsUser(const std::string& target, bool lazy) {
  return RunFusermount({lazy ? "-uz" : "-u", "--", target}, -1);
}

absl::Status CheckFusermount() {
  const char* variable = ::getenv("PATH");
  std::string_view rest = variable != nullptr ? variable : "/usr/local/bin:/usr/bin:/bin";
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(':'), rest.size());
    const std::string candidate = fmt::format("{}/{}", rest.substr(0, end), kFusermount);
    if (::access(candidate.c_str(), X_OK) == 0) return absl::OkStatus();
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return absl::UnimplementedError(
      fmt::format("{} is not in PATH (Debian package fuse3)", kFusermount));
}

}  // namespace lamina::fs
