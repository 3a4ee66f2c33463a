// SPDX-License-Identifier: Apache-2.0
#include "backends/seccomp_profile.h"

#include <cerrno>

namespace lamina::backends {
namespace {

// clang-format off
constexpr const char* kAllowed[] = {
    "_llseek", "_newselect", "accept", "accept4", "access", "adjtimex", "alarm", "arch_prctl",
    "arm_fadvise64_64", "arm_sync_file_range", "bind", "breakpoint", "brk", "cacheflush",
    "cachestat", "capget", "capset", "chdir", "chmod", "chown", "chown32", "chroot",
    "clock_adjtime", "clock_getres", "clock_getres_time64", "clock_gettime", "clock_gettime64",
    "clock_nanosleep", "clock_nanosleep_time64", "close", "close_range", "connect",
    "copy_file_range", "creat", "dup", "dup2", "dup3", "epoll_create", "epoll_create1",
    "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "eventfd", "eventfd2", "execve",
    "execveat", "exit", "exit_group", "faccessat", "faccessat2", "fadvise64", "fadvise64_64",
    "fallocate", "fanotify_mark", "fchdir", "fchmod", "fchmodat", "fchmodat2", "fchown",
    "fchown32", "fchownat", "fcntl", "fcntl64", "fdatasync", "fgetxattr", "flistxattr", "flock",
    "fork", "fremovexattr", "fsetxattr", "fstat", "fstat64", "fstatat64", "fstatfs", "fstatfs64",
    "fsync", "ftruncate", "ftruncate64", "futex", "futex_time64", "futex_waitv", "futimesat",
    "get_mempolicy", "get_robust_list", "get_thread_area", "getcpu", "getcwd", "getdents",
    "getdents64", "getegid", "getegid32", "geteuid", "geteuid32", "getgid", "getgid32",
    "getgroups", "getgroups32", "getitimer", "getpeername", "getpgid", "getpgrp", "getpid",
    "getppid", "getpriority", "getrandom", "getresgid", "getresgid32", "getresuid", "getresuid32",
    "getrlimit", "getrusage", "getsid", "getsockname", "getsockopt", "gettid", "gettimeofday",
    "getuid", "getuid32", "getxattr", "inotify_add_watch", "inotify_init", "inotify_init1",
    "inotify_rm_watch", "io_cancel", "io_destroy", "io_getevents", "io_pgetevents",
    "io_pgetevents_time64", "io_setup", "io_submit", "ioctl", "ioprio_get", "ioprio_set", "ipc",
    "kill", "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "lchown",
    "lchown32", "lgetxattr", "link", "linkat", "listen", "listxattr", "llistxattr",
    "lremovexattr", "lseek", "lsetxattr", "lstat", "lstat64", "madvise", "map_shadow_stack",
    "mbind", "membarrier", "memfd_create", "memfd_secret", "mincore", "mkdir", "mkdirat", "mknod",
    "mknodat", "mlock", "mlock2", "mlockall", "mmap", "mmap2", "modify_ldt", "mprotect",
    "mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive", "mq_timedreceive_time64",
    "mq_timedsend", "mq_timedsend_time64", "mq_unlink", "mremap", "msgctl", "msgget", "msgrcv",
    "msgsnd", "msync", "munlock", "munlockall", "munmap", "name_to_handle_at", "nanosleep",
    "newfstatat", "nice", "oldfstat", "oldlstat", "oldstat", "olduname", "open", "openat",
    "openat2", "pause", "personality", "pidfd_getfd", "pidfd_open", "pidfd_send_signal", "pipe",
    "pipe2", "pkey_alloc", "pkey_free", "pkey_mprotect", "poll", "ppoll", "ppoll_time64", "prctl",
    "pread64", "preadv", "preadv2", "prlimit64", "process_mrelease", "process_vm_readv",
    "process_vm_writev", "pselect6", "pselect6_time64", "ptrace", "pwrite64", "pwritev",
    "pwritev2", "read", "readahead", "readdir", "readlink", "readlinkat", "readv", "recvfrom",
    "recvmmsg", "recvmmsg_time64", "recvmsg", "remap_file_pages", "removexattr", "rename",
    "renameat", "renameat2", "restart_syscall", "riscv_flush_icache", "rmdir", "rseq",
    "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn",
    "rt_sigsuspend", "rt_sigtimedwait", "rt_sigtimedwait_time64", "rt_tgsigqueueinfo",
    "sched_get_priority_max", "sched_get_priority_min", "sched_getaffinity", "sched_getattr",
    "sched_getparam", "sched_getscheduler", "sched_rr_get_interval",
    "sched_rr_get_interval_time64", "sched_setaffinity", "sched_setattr", "sched_setparam",
    "sched_setscheduler", "sched_yield", "seccomp", "select", "semctl", "semget", "semop",
    "semtimedop", "semtimedop_time64", "sendfile", "sendfile64", "sendmmsg", "sendmsg", "sendto",
    "set_mempolicy", "set_robust_list", "set_thread_area", "set_tid_address", "set_tls",
    "setfsgid", "setfsgid32", "setfsuid", "setfsuid32", "setgid", "setgid32", "setgroups",
    "setgroups32", "setitimer", "setpgid", "setpriority", "setregid", "setregid32", "setresgid",
    "setresgid32", "setresuid", "setresuid32", "setreuid", "setreuid32", "setrlimit", "setsid",
    "setsockopt", "setuid", "setuid32", "setxattr", "sgetmask", "shmat", "shmctl", "shmdt",
    "shmget", "shutdown", "sigaction", "sigaltstack", "signal", "signalfd", "signalfd4",
    "sigpending", "sigprocmask", "sigreturn", "sigsuspend", "socketpair", "splice", "ssetmask",
    "stat", "stat64", "statfs", "statfs64", "statx", "symlink", "symlinkat", "sync",
    "sync_file_range", "sync_file_range2", "syncfs", "sysinfo", "tee", "tgkill", "time",
    "timer_create", "timer_delete", "timer_getoverrun", "timer_gettime", "timer_gettime64",
    "timer_settime", "timer_settime64", "timerfd_create", "timerfd_gettime", "timerfd_gettime64",
    "timerfd_settime", "timerfd_settime64", "times", "tkill", "truncate", "truncate64",
    "ugetrlimit", "umask", "uname", "unlink", "unlinkat", "utime", "utimensat",
    "utimensat_time64", "utimes", "vfork", "vmsplice", "wait4", "waitid", "waitpid", "write",
    "writev",
};

// Modules, mounts, namespaces, clocks, swap, keys, tracing of the kernel, other processes' memory
// policy, files by handle, and io_uring, whose operations no filter sees. And socketcall(2) of 32-bit
// programs, which hides the address family: libseccomp would let all of its sockets through as soon as
// socket(2) is allowed, with whatever arguments.
constexpr const char* kDenied[] = {
    "_sysctl", "acct", "add_key", "bpf", "clock_settime", "create_module", "delete_module",
    "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "get_kernel_syms",
    "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl",
    "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "migrate_pages", "mount",
    "mount_setattr", "move_mount", "move_pages", "nfsservctl", "open_by_handle_at", "open_tree",
    "perf_event_open", "pivot_root", "process_madvise", "query_module", "quotactl", "quotactl_fd",
    "reboot", "request_key", "set_mempolicy_home_node", "setdomainname", "sethostname", "setns",
    "settimeofday", "socketcall", "stime", "swapoff", "swapon", "sysfs", "syslog", "umount",
    "umount2", "unshare", "uselib", "userfaultfd", "ustat", "vhangup", "vm86", "vm86old",
};
// clang-format on

}  // namespace

std::span<const char* const> AllowedCalls() { return kAllowed; }
std::span<const char* const> DeniedCalls() { return kDenied; }

nlohmann::json SeccompForContainers() {
  using nlohmann::json;
  const auto argument = [](const char* operation, uint64_t value) {
    return json::array({{{"index", 0}, {"op", operation}, {"value", value}, {"valueTwo", 0}}});
  };
#if defined(__x86_64__)
  const json architectures = {"SCMP_ARCH_X86_64", "SCMP_ARCH_X86"};
#elif defined(__aarch64__)
  const json architectures = {"SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"};
#else
  const json architectures = json::array();
#endif
  return {
      {"defaultAction", "SCMP_ACT_ERRNO"},
      {"defaultErrnoRet", ENOSYS},
      {"architectures", architectures},
      {"syscalls",
       json::array({{{"names", json(kAllowed)}, {"action", "SCMP_ACT_ALLOW"}},
                    {{"names", json(kDenied)}, {"action", "SCMP_ACT_ERRNO"}, {"errnoRet", EPERM}},
                    {{"names", {"clone"}},
                     {"action", "SCMP_ACT_ALLOW"},
                     {"args", argument("SCMP_CMP_MASKED_EQ", kNamespaceFlags)}},
                    {{"names", {"socket"}},
                     {"action", "SCMP_ACT_ALLOW"},
                     {"args", argument("SCMP_CMP_LE", kLastAddressFamily)}}})},
  };
}

}  // namespace lamina::backends
