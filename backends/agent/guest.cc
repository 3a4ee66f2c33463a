// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/guest.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/reboot.h>
#include <linux/vm_sockets.h>
#include <net/if.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <thread>

#include "backends/agent/direct_runner.h"
#include "backends/agent/guest_devices.h"
#include "backends/agent/mux.h"
#include "backends/agent/reclaim.h"
#include "backends/agent/server.h"

namespace lamina::agent {
namespace {

// Programs are in this control group, the agent is not.
constexpr const char* kGroup = "/sys/fs/cgroup/lamina";

uint64_t NumberParameter(const std::string& key) {
  const std::string text = KernelParameter("lamina." + key);
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : 0;
}

// Whether what is written goes to a disk, and not to memory.
bool HasDisk() { return KernelParameter("lamina.upper") == "disk"; }

absl::Status Mount(const std::string& source, const std::string& target, const char* type,
                   unsigned long flags, const std::string& options = "") {
  if (::mount(source.c_str(), target.c_str(), type, flags, options.c_str()) == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus(errno, fmt::format("mount {} on {}", source, target));
}

// A directory that is there, or is made.
absl::Status NeedDirectory(const std::string& path, mode_t mode = 0755) {
  if (::mkdir(path.c_str(), mode) == 0) return absl::OkStatus();
  struct stat info {};
  if (errno == EEXIST && ::lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    return absl::OkStatus();
  }
  return ErrnoStatus(errno, "make directory " + path);
}

absl::Status WriteText(const std::string& path, std::string_view text) {
  ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(path, O_WRONLY));
  if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return ErrnoStatus(errno, "write " + path);
  }
  return absl::OkStatus();
}

absl::Status MountKernelFiles() {
  for (const char* directory : {"/dev", "/proc", "/sys", "/image", "/upper", "/root"}) {
    RETURN_IF_ERROR(NeedDirectory(directory));
  }
  RETURN_IF_ERROR(Mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID));
  const int console = ::open("/dev/console", O_RDWR | O_NOCTTY | O_CLOEXEC);
  for (int stream = 0; console >= 0 && stream < 3; ++stream) ::dup2(console, stream);
  RETURN_IF_ERROR(Mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC));
  return Mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC);
}

// The image at /image, and at /root with what is written to it.
absl::Status MountImage() {
  ASSIGN_OR_RETURN(const std::vector<std::string> devices,
                   FindPmemDevices(NumberParameter("layers") + 1));
  std::string options = "dax=always";
  for (size_t slot = 1; slot < devices.size(); ++slot) options += ",device=" + devices[slot];
  RETURN_IF_ERROR(Mount(devices[0], "/image", "erofs", MS_RDONLY, options));
  if (HasDisk()) {
    RETURN_IF_ERROR(Mount("/dev/vda", "/upper", "ext4", MS_NOATIME));
  } else {
    // As much as programs may have: what they write counts as their memory.
    RETURN_IF_ERROR(Mount("upper", "/upper", "tmpfs", MS_NOATIME, "size=100%,mode=700"));
  }
  struct stat info {};
  if (::stat("/image", &info) != 0) return ErrnoStatus(errno, "look at the image");
  // overlayfs shows the attributes of the upper directory for the root.
  if (::mkdir("/upper/data", 0700) == 0) {
    if (::chown("/upper/data", info.st_uid, info.st_gid) != 0 ||
        ::chmod("/upper/data", info.st_mode & 07777) != 0) {
      return ErrnoStatus(errno, "make the root of what is written");
    }
  } else if (errno != EEXIST) {
    return ErrnoStatus(errno, "make the root of what is written");
  }
  RETURN_IF_ERROR(NeedDirectory("/upper/work", 0700));
  return Mount("overlay", "/root", "overlay", 0,
               "lowerdir=/image,upperdir=/upper/data,workdir=/upper/work");
}

// As switch_root(8) does it.
absl::Status SwitchRoot() {
  for (const char* directory : {"/dev", "/proc", "/sys"}) {
    const std::string target = std::string("/root") + directory;
    RETURN_IF_ERROR(NeedDirectory(target));
    RETURN_IF_ERROR(Mount(directory, target, nullptr, MS_MOVE));
  }
  // They take memory.
  std::error_code ignored;
  std::filesystem::remove_all("/modules", ignored);
  std::filesystem::remove(std::string(kGuestInit), ignored);
  if (::chdir("/root") != 0) return ErrnoStatus(errno, "change to the image");
  RETURN_IF_ERROR(Mount(".", "/", nullptr, MS_MOVE));
  if (::chroot(".") != 0 || ::chdir("/") != 0) return ErrnoStatus(errno, "change the root");
  return absl::OkStatus();
}

absl::Status PrepareDevices() {
  for (const char* directory : {"/dev/pts", "/dev/shm"}) RETURN_IF_ERROR(NeedDirectory(directory));
  RETURN_IF_ERROR(Mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
                        "ptmxmode=0666,mode=0620,gid=5"));
  RETURN_IF_ERROR(Mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777"));
  constexpr std::pair<const char*, const char*> kLinks[] = {{"/proc/self/fd", "/dev/fd"},
                                                            {"/proc/self/fd/0", "/dev/stdin"},
                                                            {"/proc/self/fd/1", "/dev/stdout"},
                                                            {"/proc/self/fd/2", "/dev/stderr"}};
  for (const auto& [target, link] : kLinks) std::ignore = ::symlink(target, link);
  const std::string hostname = KernelParameter("lamina.hostname");
  ::sethostname(hostname.data(), hostname.size());
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq loopback{.ifr_ifrn = {.ifrn_name = "lo"}};
  loopback.ifr_flags = IFF_UP | IFF_RUNNING;
  if (::ioctl(socket.get(), SIOCSIFFLAGS, &loopback) != 0) {
    return ErrnoStatus(errno, "start the loopback device");
  }
  return absl::OkStatus();
}

absl::Status MakeGroup() {
  // As on hosts with much memory: a program that asks for more than there is ends when it uses it.
  RETURN_IF_ERROR(WriteText("/proc/sys/vm/overcommit_memory", "1"));
  RETURN_IF_ERROR(Mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC));
  RETURN_IF_ERROR(WriteText("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids"));
  RETURN_IF_ERROR(NeedDirectory(kGroup));
  constexpr std::pair<const char*, const char*> kLimits[] = {{"memory", "/memory.max"},
                                                             {"processes", "/pids.max"}};
  for (const auto& [parameter, file] : kLimits) {
    const uint64_t limit = NumberParameter(parameter);
    if (limit > 0) RETURN_IF_ERROR(WriteText(std::string(kGroup) + file, std::to_string(limit)));
  }
  return absl::OkStatus();
}

// What programs may have: all but what gets at the agent, or behind the kernel.
constexpr uint64_t ProgramCapabilities() {
  constexpr uint64_t kAll = (uint64_t{1} << (CAP_LAST_CAP + 1)) - 1;
  uint64_t capabilities = kAll;
  for (const int kept : {CAP_SYS_PTRACE, CAP_SYS_MODULE, CAP_SYS_RAWIO}) {
    capabilities &= ~(uint64_t{1} << kept);
  }
  return capabilities;
}

// A machine that was paused, or started from a snapshot, has the time of when that was.
void SetClock(std::chrono::microseconds host) {
  constexpr std::chrono::milliseconds kTolerance{100};
  const auto ours = std::chrono::system_clock::now().time_since_epoch();
  if (std::chrono::abs(host - ours) < kTolerance) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(host);
  const timespec time{.tv_sec = seconds.count(), .tv_nsec = (host - seconds).count() * 1000};
  ::clock_settime(CLOCK_REALTIME, &time);
}

absl::Status ServeOnPort(Runner& runner) {
  ASSIGN_OR_RETURN(UniqueFd port, OpenSerialPort(std::string(kAgentPort)));
  Server server(UniqueFd(), runner, {});
  ASSIGN_OR_RETURN(const std::unique_ptr<Mux> mux,
                   Mux::Create(Mux::Side::kGuest, std::move(port),
                               {.opened = [&](UniqueFd socket) { server.Take(std::move(socket)); },
                                .clock = SetClock}));
  std::thread([&server] { server.Serve().IgnoreError(); }).detach();
  return mux->Run();
}

absl::Status ServeOnVsock(unsigned port, Runner& runner) {
  UniqueFd listener(::socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_vm address{.svm_family = AF_VSOCK, .svm_port = port, .svm_cid = VMADDR_CID_ANY};
  constexpr int kQueue = 128;
  if (!listener.valid() ||
      ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener.get(), kQueue) != 0) {
    return ErrnoStatus(errno, fmt::format("listen on vsock port {}", port));
  }
  return Server(std::move(listener), runner, {}).Serve();
}

absl::Status SetUpAndServe() {
  RETURN_IF_ERROR(MountKernelFiles());
  RETURN_IF_ERROR(LoadModules("/modules"));
  // The sets of backends/vm/guest_kernel.h.
  if (HasDisk()) RETURN_IF_ERROR(LoadModules("/modules/disk"));
  if (NumberParameter("vsock") > 0) RETURN_IF_ERROR(LoadModules("/modules/vsock"));
  RETURN_IF_ERROR(MountImage());
  RETURN_IF_ERROR(SwitchRoot());
  RETURN_IF_ERROR(PrepareDevices());
  RETURN_IF_ERROR(MakeGroup());
  const std::string group = kGroup;
  ASSIGN_OR_RETURN(UniqueFd programs, OpenFile(group + "/cgroup.procs", O_WRONLY));
  const std::unique_ptr<DirectRunner> runner =
      DirectRunner::Start({.capabilities = ProgramCapabilities(),
                           .group = std::move(programs),
                           .memory_events = group + "/memory.events"});
  if (NumberParameter("reclaim") > 0) {
    if (const absl::Status started = StartReclaim(); !started.ok()) {
      std::fprintf(stderr, "lamina-agent: cold pages stay: %s\n",
                   std::string(started.message()).c_str());
    }
  }
  const uint64_t vsock = NumberParameter("vsock");
  if (vsock > 0) return ServeOnVsock(static_cast<unsigned>(vsock), *runner);
  return ServeOnPort(*runner);
}

}  // namespace

void RunGuest() {
  ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  ::signal(SIGPIPE, SIG_IGN);
  ::umask(022);
  RaiseDescriptorLimit();  // a connection over the port takes two
  if (const absl::Status done = SetUpAndServe(); !done.ok()) {
    std::fprintf(stderr, "lamina-agent: %s\n", std::string(done.message()).c_str());
    std::fflush(stderr);
  }
  ::sync();
  // The kernel turns the machine off, or its host does when it starts again.
  ::reboot(RB_AUTOBOOT);
  while (true) ::pause();
}

}  // namespace lamina::agent
