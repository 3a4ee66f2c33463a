// SPDX-License-Identifier: Apache-2.0
#include "backends/fncall/call_process.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/openat2.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "backends/agent/frame.h"
#include "backends/agent/messages.h"
#include "backends/agent/program.h"
#include "backends/agent/tree.h"

namespace lamina::fncall {
namespace {

using agent::CallFile;
using agent::ExecMessage;
using std::chrono::steady_clock;

constexpr uint64_t kMaxRequest = agent::kMaxFrame;

absl::StatusOr<ExecMessage> ReadRequest(int file) {
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(file));
  if (size > kMaxRequest) return absl::ResourceExhaustedError("request");
  std::string bytes(size, '\0');
  RETURN_IF_ERROR(ReadFull(file, 0, std::as_writable_bytes(std::span(bytes))));
  return agent::DecodeExec(bytes);
}

UniqueFd OpenBeneath(int directory, const std::string& path, uint64_t flags, uint64_t mode) {
  open_how how = {.flags = flags | O_CLOEXEC | O_NOFOLLOW,
                  .mode = mode,
                  .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS};
  return UniqueFd(
      static_cast<int>(::syscall(SYS_openat2, directory, path.c_str(), &how, sizeof(how))));
}

// Files of the call, written before anything of it runs.
absl::Status PutFiles(int directory, const JailOptions& options,
                      const std::vector<CallFile>& files) {
  for (const CallFile& file : files) {
    RETURN_IF_ERROR(agent::CheckRelativePath(file.path));
    if (file.path.empty()) return absl::InvalidArgumentError("a file without a name");
    for (size_t slash = file.path.find('/'); slash != std::string::npos;
         slash = file.path.find('/', slash + 1)) {
      const std::string above = file.path.substr(0, slash);
      if (::mkdirat(directory, above.c_str(), 0755) == 0) {
        ::fchownat(directory, above.c_str(), options.host_uid, options.host_uid,
                   AT_SYMLINK_NOFOLLOW);
      } else if (errno != EEXIST) {
        return ErrnoStatus(errno, above);
      }
    }
    const UniqueFd out = OpenBeneath(directory, file.path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (!out.valid()) return ErrnoStatus(errno, file.path);
    RETURN_IF_ERROR(WriteFull(out.get(), 0, AsBytes(file.content)));
    if (::fchown(out.get(), options.host_uid, options.host_uid) != 0 ||
        ::fchmod(out.get(), file.mode & 0777) != 0) {
      return ErrnoStatus(errno, file.path);
    }
  }
  return absl::OkStatus();
}

// Files that come back; all processes that could change them are dead. Links are not followed, and
// nothing but a regular file is opened.
std::vector<CallFile> GetFiles(int directory, const ExecMessage& message) {
  std::vector<CallFile> files;
  uint64_t left = agent::kMaxCallBytes;
  for (const std::string& path : message.files_out) {
    CallFile file{.path = path};
    const absl::Status got = [&]() -> absl::Status {
      RETURN_IF_ERROR(agent::CheckRelativePath(path));
      const UniqueFd place = OpenBeneath(directory, path, O_PATH, 0);
      if (!place.valid()) return ErrnoStatus(errno, "open");
      struct stat info {};
      if (::fstat(place.get(), &info) != 0) return ErrnoStatus(errno, "stat");
      if (!S_ISREG(info.st_mode)) return absl::FailedPreconditionError("not a regular file");
      const auto size = static_cast<uint64_t>(info.st_size);
      if (size > left) return absl::ResourceExhaustedError(fmt::format("has {} bytes", size));
      const UniqueFd in = OpenBeneath(directory, path, O_RDONLY | O_NONBLOCK, 0);
      if (!in.valid()) return ErrnoStatus(errno, "open");
      file.content.resize(size);
      RETURN_IF_ERROR(ReadFull(in.get(), 0, std::as_writable_bytes(std::span(file.content))));
      file.mode = info.st_mode & 0777;
      left -= size;
      return absl::OkStatus();
    }();
    if (!got.ok()) {
      file.content.clear();
      file.error = std::string(got.message());
    }
    files.push_back(std::move(file));
  }
  return files;
}

// What follows: between fork and exec.

bool WriteFile(const char* path, const char* text) {
  const UniqueFd file(::open(path, O_WRONLY | O_CLOEXEC));
  const auto size = static_cast<ssize_t>(std::strlen(text));
  return file.valid() && ::write(file.get(), text, static_cast<size_t>(size)) == size;
}

int GiveUpPrivileges(const JailOptions& options) {
  const rlimit no_core{};
  ::setrlimit(RLIMIT_CORE, &no_core);
  const uid_t id = options.host_uid;
  agent::GivePipesTo(id, id);
  if (::setgroups(0, nullptr) != 0 || ::setresgid(id, id, id) != 0 ||
      ::setresuid(id, id, id) != 0) {
    return errno;
  }
  // Else its own files in /proc would be root's (proc(5)).
  ::prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
  if (::unshare(CLONE_NEWUSER) != 0) return errno;
  // One id each, and no way to others: everything of the image belongs to nobody here.
  std::array<char, 64> map{};
  std::snprintf(map.data(), map.size(), "%u %u 1", kInsideId, id);
  if (!WriteFile("/proc/self/setgroups", "deny") || !WriteFile("/proc/self/uid_map", map.data()) ||
      !WriteFile("/proc/self/gid_map", map.data())) {
    return errno;
  }
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return errno;
  return options.filter->Load();
}

// Until the process has ended: true with its wait status. Orphans of the call arrive here as well.
void WaitFor(pid_t process, int pidfd, int socket) {
  std::array<pollfd, 2> waits{pollfd{pidfd, POLLIN}, pollfd{socket, POLLIN}};
  while (true) {
    if (::poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) return;
    if (waits[0].revents != 0) return;
    if (waits[1].revents == 0) continue;
    const auto packet = ReceivePacket(socket);
    if (!packet.ok()) {  // the slot is gone
      ::kill(-1, SIGKILL);
      return;
    }
    if (packet->first.order == Order::kKill) ::kill(-1, SIGKILL);
    // As long as it has not made its session it has no group of its own.
    if (packet->first.order == Order::kSignal && ::kill(-process, packet->first.signal) != 0) {
      ::kill(process, packet->first.signal);
    }
  }
}

}  // namespace

Report RunCall(const JailOptions& options, int socket, CallDescriptors descriptors) {
  Report report;
  const absl::StatusOr<ExecMessage> message = ReadRequest(descriptors.request.get());
  if (!message.ok()) {
    report.failed_errno = StatusToErrno(message.status());
    return report;
  }
  const bool with_files = !message->files_in.empty() || !message->files_out.empty();
  UniqueFd directory;
  if (with_files) {
    directory.Reset(::open(message->working_directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    const absl::Status put = directory.valid()
                                 ? PutFiles(directory.get(), options, message->files_in)
                                 : ErrnoStatus(errno, "working directory");
    if (!put.ok()) {
      report.start = {StatusToErrno(put), /*of_directory=*/true};
      return report;
    }
  }
  const agent::Program program(*message);
  agent::Streams streams{.in = std::move(descriptors.in),
                         .out = std::move(descriptors.out),
                         .err = std::move(descriptors.err)};
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    report.failed_errno = errno;
    return report;
  }
  const UniqueFd failure_read(ends[0]);
  UniqueFd failure_write(ends[1]);
  const steady_clock::time_point start = steady_clock::now();
  const pid_t pid = ::fork();
  if (pid == 0) {
    program.Become(streams, failure_write.get(), [&] { return GiveUpPrivileges(options); });
  }
  if (pid < 0) {
    report.failed_errno = errno;
    return report;
  }
  failure_write.Reset();
  const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  // Its output must end with it.
  streams = agent::Streams();
  WaitFor(pid, pidfd.get(), socket);
  report.wall_us = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(steady_clock::now() - start).count());
  ::kill(-1, SIGKILL);
  while (true) {
    int status = 0;
    const pid_t reaped = ::waitpid(-1, &status, 0);
    if (reaped == pid) report.wait_status = status;
    if (reaped < 0 && errno != EINTR) break;
  }
  rusage usage{};
  ::getrusage(RUSAGE_CHILDREN, &usage);
  report.cpu_us = agent::ProcessorTime(usage);
  report.peak_bytes = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
  agent::StartFailure failure;
  if (::read(failure_read.get(), &failure, sizeof(failure)) == sizeof(failure)) {
    report.start = failure;
    return report;
  }
  if (!message->files_out.empty()) {
    agent::EndedMessage files{.files_out = GetFiles(directory.get(), *message)};
    const std::string bytes = agent::Encode(files);
    if (!WriteFull(descriptors.result.get(), 0, AsBytes(bytes)).ok()) report.failed_errno = EIO;
  }
  return report;
}

}  // namespace lamina::fncall
