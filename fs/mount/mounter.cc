// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/mounter.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include <cerrno>
#include <cstdint>

#include "fs/mount/mount.h"
#include "fs/mount/overlay.h"

namespace lamina::fs {
namespace {

// A message each way: its length, then fields with a NUL between them, which none can contain.
// Requests: an operation and its arguments. Answers: a status code and a text.
constexpr char kErofs[] = "erofs";
constexpr char kShare[] = "share";
constexpr char kOverlay[] = "overlay";
constexpr char kUnmount[] = "unmount";
constexpr char kYes[] = "yes";
constexpr char kNo[] = "no";
using Fields = std::vector<std::string>;

absl::Status Send(int socket, const Fields& fields) {
  const std::string body = absl::StrJoin(fields, absl::string_view("\0", 1));
  const uint64_t length = body.size();
  std::string message(reinterpret_cast<const char*>(&length), sizeof(length));
  message += body;
  for (size_t sent = 0; sent < message.size();) {
    const ssize_t put = ::send(socket, message.data() + sent, message.size() - sent, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return ErrnoStatus(errno, "send to the mounting process");
    sent += static_cast<size_t>(put);
  }
  return absl::OkStatus();
}

absl::Status ReceiveBytes(int socket, std::span<char> into) {
  while (!into.empty()) {
    const ssize_t got = ::recv(socket, into.data(), into.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "receive from the mounting process");
    if (got == 0) return absl::UnavailableError("the mounting process has ended");
    into = into.subspan(static_cast<size_t>(got));
  }
  return absl::OkStatus();
}

absl::StatusOr<Fields> Receive(int socket) {
  uint64_t length = 0;
  RETURN_IF_ERROR(
      ReceiveBytes(socket, std::span(reinterpret_cast<char*>(&length), sizeof(length))));
  std::string body(length, '\0');
  RETURN_IF_ERROR(ReceiveBytes(socket, body));
  return Fields(absl::StrSplit(body, '\0'));
}

absl::Status MakeUpper(const std::string& lower, const std::string& upper) {
  if (::mkdir(upper.c_str(), 0700) != 0) {
    if (errno == EEXIST) return absl::OkStatus();
    return ErrnoStatus(errno, "create directory " + upper);
  }
  return CopyDirectoryAttributes(lower, upper);
}

absl::Status Execute(const Fields& request) {
  if (request.size() >= 4 && request[0] == kErofs) {
    const Fields devices(request.begin() + 4, request.end());
    return MountErofs(request[1], devices, request[2], request[3] == kYes);
  }
  if (request.size() == 3 && request[0] == kShare) return ShareErofs(request[1], request[2]);
  if (request.size() >= 6 && request[0] == kOverlay) {
    const OverlayDirectories directories{.lowers = Fields(request.begin() + 5, request.end()),
                                         .upper = request[1],
                                         .work = request[2],
                                         .is_volatile = request[3] == kYes};
    RETURN_IF_ERROR(MakeUpper(directories.lowers[0], directories.upper));
    return MountOverlay(directories, request[4]);
  }
  if (request.size() == 3 && request[0] == kUnmount) {
    return Unmount(request[1], request[2] == kYes);
  }
  return absl::InternalError("the mounting process was asked for something unknown");
}

// The process. It keeps nothing that it was born with but the standard streams and the socket: least
// of all FUSE descriptors, which would keep connections alive.
[[noreturn]] void Serve(int socket, pid_t parent, const std::string& lock) {
  ::prctl(PR_SET_NAME, "lamina-mounter");
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_BLOCK, &all, nullptr);  // the parent decides when this ends
  constexpr int kSocket = STDERR_FILENO + 1;
  if (socket != kSocket) ::dup2(socket, kSocket);
  ::close_range(kSocket + 1, ~0U, 0);
  const auto locked = OpenFile(lock, O_RDWR | O_CREAT, 0600);
  if (!locked.ok() || ::flock(locked->get(), LOCK_EX) != 0) ::_exit(1);
  while (true) {
    const auto request = Receive(kSocket);
    if (!request.ok()) ::_exit(0);
    const absl::Status status = Execute(*request);
    const Fields answer{std::to_string(status.raw_code()), std::string(status.message())};
    if (!Send(kSocket, answer).ok()) ::_exit(1);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Mounter>> Mounter::Start(const std::string& lock) {
  std::unique_ptr<Mounter> mounter(new Mounter(lock));
  RETURN_IF_ERROR(mounter->StartProcess());
  return mounter;
}

absl::Status Mounter::StartProcess() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus(errno, "socketpair");
  }
  UniqueFd ours(ends[0]);
  const UniqueFd theirs(ends[1]);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return ErrnoStatus(errno, "fork the mounting process");
  if (child == 0) Serve(theirs.get(), parent, lock_);
  socket_ = std::move(ours);
  process_ = child;
  return absl::OkStatus();
}

void Mounter::EndProcess() {
  if (!socket_.valid()) return;
  socket_.Reset();
  while (::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
  process_ = 0;
}

Mounter::~Mounter() { EndProcess(); }

absl::Status Mounter::Call(const Fields& fields) {
  std::lock_guard lock(mutex_);
  if (!socket_.valid()) RETURN_IF_ERROR(StartProcess());
  absl::Status status = Send(socket_.get(), fields);
  absl::StatusOr<Fields> received;
  if (status.ok()) {
    received = Receive(socket_.get());
    status = received.status();
  }
  if (!status.ok()) {
    EndProcess();
    return status;
  }
  const Fields& answer = *received;
  if (answer.size() != 2) return absl::InternalError("the mounting process is not understood");
  const int code = std::atoi(answer[0].c_str());
  if (code == 0) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(code), answer[1]);
}

absl::Status Mounter::MountErofs(const std::string& metadata,
                                 const std::vector<std::string>& devices, const std::string& target,
                                 bool loop) {
  Fields request{kErofs, metadata, target, loop ? kYes : kNo};
  request.insert(request.end(), devices.begin(), devices.end());
  return Call(request);
}

absl::Status Mounter::ShareErofs(const std::string& source, const std::string& target) {
  return Call({kShare, source, target});
}

absl::Status Mounter::Unmount(const std::string& target, bool detach) {
  return Call({kUnmount, target, detach ? kYes : kNo});
}

absl::Status Mounter::MountOverlay(const OverlayDirectories& directories,
                                   const std::string& target) {
  Fields request{kOverlay, directories.upper, directories.work,
                 directories.is_volatile ? kYes : kNo, target};
  request.insert(request.end(), directories.lowers.begin(), directories.lowers.end());
  return Call(request);
}

}  // namespace lamina::fs
