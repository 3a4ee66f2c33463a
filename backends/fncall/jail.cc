// SPDX-License-Identifier: Apache-2.0
#include "backends/fncall/jail.h"

#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "backends/fncall/call_process.h"

namespace lamina::fncall {
namespace {

absl::Status MountAt(const char* type, const char* target, unsigned long flags,
                     const std::string& options) {
  if (::mount(type, target, type, flags, options.c_str()) != 0) {
    return ErrnoStatus(errno, fmt::format("mount {} on {}", type, target));
  }
  return absl::OkStatus();
}

absl::Status MakeDevices() {
  struct Device {
    const char* path;
    unsigned major;
    unsigned minor;
  };
  constexpr std::array<Device, 5> kDevices{Device{"/dev/null", 1, 3}, Device{"/dev/zero", 1, 5},
                                           Device{"/dev/full", 1, 7}, Device{"/dev/random", 1, 8},
                                           Device{"/dev/urandom", 1, 9}};
  for (const Device& device : kDevices) {
    if (::mknod(device.path, S_IFCHR | 0666, ::makedev(device.major, device.minor)) != 0 ||
        ::chmod(device.path, 0666) != 0) {
      return ErrnoStatus(errno, fmt::format("make {}", device.path));
    }
  }
  struct Link {
    const char* target;
    const char* path;
  };
  // Shared memory is in /tmp, so that it has the same limit and the same end.
  constexpr std::array<Link, 5> kLinks{
      Link{"/proc/self/fd", "/dev/fd"}, Link{"/proc/self/fd/0", "/dev/stdin"},
      Link{"/proc/self/fd/1", "/dev/stdout"}, Link{"/proc/self/fd/2", "/dev/stderr"},
      Link{"/tmp", "/dev/shm"}};
  for (const Link& link : kLinks) {
    if (::symlink(link.target, link.path) != 0) {
      return ErrnoStatus(errno, fmt::format("make {}", link.path));
    }
  }
  return absl::OkStatus();
}

// "lo" is down in a new network namespace.
void BringUpLoopback() {
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::strncpy(request.ifr_name, "lo", IFNAMSIZ - 1);
  request.ifr_flags = IFF_UP;
  ::ioctl(socket.get(), SIOCSIFFLAGS, &request);
}

absl::Status SetUp(const JailOptions& options) {
  // The first process goes with the slot, and all else in the jail with it.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  RETURN_IF_ERROR(MountAt("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, ""));
  RETURN_IF_ERROR(MountAt("tmpfs", "/tmp", MS_NOSUID | MS_NODEV,
                          fmt::format("size={},nr_inodes=65536,mode=1777,uid={},gid={}",
                                      options.tmp_bytes, options.host_uid, options.host_uid)));
  constexpr std::string_view kHostname = "call";
  if (::sethostname(kHostname.data(), kHostname.size()) != 0) {
    return ErrnoStatus(errno, "sethostname");
  }
  BringUpLoopback();
  return absl::OkStatus();
}

[[noreturn]] void JailMain(const JailOptions& options, int socket) {
  // The slot's other descriptors are not the jail's business, and some must close with the slot.
  const auto kept = static_cast<unsigned>(socket);
  if (kept > STDERR_FILENO + 1) ::syscall(SYS_close_range, STDERR_FILENO + 1, kept - 1, 0);
  ::syscall(SYS_close_range, kept + 1, ~0U, 0);
  Report report;
  const absl::Status ready = SetUp(options);
  if (!ready.ok()) {
    report.failed_errno = StatusToErrno(ready);
    SendReport(socket, report).IgnoreError();
    ::_exit(1);
  }
  // Says that it is ready.
  if (!SendReport(socket, report).ok()) ::_exit(1);
  auto call = ReceivePacket(socket);
  if (!call.ok() || call->first.order != Order::kCall) ::_exit(1);
  report = RunCall(options, socket, std::move(call->second));
  SendReport(socket, report).IgnoreError();
  ::_exit(0);
}

}  // namespace

absl::Status EnterImage(const JailOptions& options) {
  if (::unshare(CLONE_NEWNS) != 0) return ErrnoStatus(errno, "unshare mounts");
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return ErrnoStatus(errno, "make mounts private");
  }
  const char* rootfs = options.rootfs.c_str();
  if (::mount(rootfs, rootfs, nullptr, MS_BIND, nullptr) != 0 || ::chdir(rootfs) != 0) {
    return ErrnoStatus(errno, fmt::format("bind {}", options.rootfs));
  }
  // pivot_root(2): the old root lies over the new one, and is taken off.
  if (::syscall(SYS_pivot_root, ".", ".") != 0 || ::umount2(".", MNT_DETACH) != 0 ||
      ::chdir("/") != 0) {
    return ErrnoStatus(errno, fmt::format("change the root to {}", options.rootfs));
  }
  // From here on a path cannot lead out of the image, whatever links it has.
  for (const char* directory : {"/dev", "/proc", "/tmp"}) {
    if (::mkdir(directory, 0755) != 0 && errno != EEXIST) {
      return ErrnoStatus(errno, fmt::format("make {} of the image", directory));
    }
  }
  ::umask(0);
  RETURN_IF_ERROR(MountAt("tmpfs", "/dev", MS_NOSUID | MS_NOEXEC, "size=64k,mode=755"));
  RETURN_IF_ERROR(MakeDevices());
  ::umask(022);
  for (const char* mount : {"/dev", "/"}) {
    const bool is_root = std::strcmp(mount, "/") == 0;
    const unsigned long flags =
        MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | (is_root ? MS_NODEV : MS_NOEXEC);
    if (::mount(nullptr, mount, nullptr, flags, nullptr) != 0) {
      return ErrnoStatus(errno, fmt::format("make {} read-only", mount));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Jail> Jail::Prepare(const JailOptions& options) {
  ASSIGN_OR_RETURN(SocketPair pair, MakeSocketPair());
  const auto flags = static_cast<unsigned long>(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET |
                                                CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP);
  // As fork(2): this process has one thread.
  const auto process =
      static_cast<pid_t>(::syscall(SYS_clone, flags | SIGCHLD, nullptr, nullptr, nullptr, nullptr));
  if (process < 0) return ErrnoStatus(errno, "make the namespaces of a jail");
  if (process == 0) {
    const int socket = pair.theirs.get();
    pair.ours.Reset();
    JailMain(options, socket);
  }
  Jail jail(process, std::move(pair.ours));
  pair.theirs.Reset();
  ASSIGN_OR_RETURN(const Report ready, ReceiveReport(jail.socket()), "prepare a jail");
  if (ready.failed_errno != 0) return ErrnoStatus(ready.failed_errno, "prepare a jail");
  return jail;
}

void Jail::Kill() {
  if (process_ > 0) ::kill(process_, SIGKILL);
}

void Jail::WaitForEnd() {
  if (process_ <= 0) return;
  // The kernel lets a first process end when all others of its namespace have (pid_namespaces(7)).
  while (::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
  process_ = 0;
}

Jail::~Jail() {
  Kill();
  WaitForEnd();
}

}  // namespace lamina::fncall
