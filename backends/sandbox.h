// SPDX-License-Identifier: Apache-2.0
//
// Sandboxes: places to run programs of an image in, behind one interface whatever isolates them. A
// backend that cannot do something says so in its capabilities, and with kUnimplemented.
//
// A sandbox lives on when the process that made it ends, and can be found again (launcher.h).
#ifndef LAMINA_BACKENDS_SANDBOX_H_
#define LAMINA_BACKENDS_SANDBOX_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/agent/messages.h"
#include "chunkstore/base/status.h"
#include "chunkstore/registry/settings.h"

namespace lamina::backends {

enum class Network {
  kNone,  // a loopback device of its own, and nothing else
  kHost,  // the host's network, as it is
};

// 0 is no limit. They hold for the sandbox as a whole; for stateless calls, for each call. A program that
// Exec is asked for starts also if there are `processes` already: it counts as well, and only then fails
// to start others.
struct Limits {
  uint64_t memory_bytes = 0;
  uint64_t cpu_millis = 0;  // thousandths of a processor
  uint64_t processes = 0;
  uint64_t disk_bytes = 0;  // what it may write
};

struct SandboxOptions {
  std::string image;  // a converted image ("oci:DIR[:TAG]", DIR absolute, or "docker://...")
  registry::Settings registry;
  std::string snapshot;  // the name of a snapshot to start from, in place of an image
  // More images, to be put on top of it, lowest first. What a snapshot has is put on top of them: by
  // default those that its sandbox had.
  std::vector<std::string> layers;
  Limits limits;
  std::vector<std::string> environment;  // "NAME=value", beyond the image's
  std::string user;                      // empty: the image's
  std::string working_directory;         // empty: the image's
  Network network = Network::kNone;
  std::chrono::milliseconds ttl{0};       // it ends after that; 0: never
  std::chrono::milliseconds idle_ttl{0};  // after that without a program or copy under way
  // Stateless backends: places that are kept ready, which is also how many calls run at a time.
  uint32_t warm = 2;
  // Containers: "crun" (also if empty) or "runc". Machines of QEMU: "kvm" or "tcg"; if it is empty, kvm
  // where it can be used.
  std::string runtime;
  // Machines: what is not used goes back to the host.
  bool reclaim = true;
};

enum class Stream { kStdout, kStderr };

struct ExecRequest {
  // A program and its arguments, or, if it is empty, `script` for /bin/sh.
  std::vector<std::string> arguments;
  std::string script;
  std::vector<std::string> environment;  // beyond the sandbox's
  std::string user;                      // empty: the sandbox's
  std::string working_directory;         // empty: the sandbox's
  // A session, made by its first use. Commands in one run one at a time, each in a shell (/bin/sh of
  // the image), which starts with the working directory and the exported variables that the one
  // before left. Others than the first one's user have no part in it.
  std::string session;

  std::string stdin_text;  // or, if it is not -1:
  int stdin_fd = -1;       // read to its end while the program runs; borrowed

  // How much of each stream is kept in the result; the rest is read and thrown away.
  uint64_t kept_output = 1 << 20;
  // Gets all output as it comes, kept or not. Called in the thread that called Exec.
  std::function<void(Stream stream, std::string_view bytes)> on_output;
  // A descriptor to poll while the program runs, -1 for none: when it is readable `next_signal` is
  // asked for a signal to send (0: none). For commands that pass on their own signals.
  int signal_fd = -1;
  std::function<int()> next_signal;

  std::chrono::milliseconds timeout{0};   // killed after that; 0: none
  std::chrono::milliseconds cpu_time{0};  // processor time, counted in whole seconds; 0: none
  uint64_t output_limit = 0;              // killed when it has written more; 0: none
  uint64_t file_limit = 0;                // bytes of one file; 0: none

  // Stateless backends: files that the call finds in its working directory, and the names of those
  // that come back from there: at most agent::kMaxCallFiles each way, and agent::kMaxCallBytes that come
  // back. More is an error of the file.
  std::vector<agent::CallFile> files_in;
  std::vector<std::string> files_out;
};

// How a program ended. Each has one meaning.
enum class ExecEnding {
  kExited,         // by itself: `exit_code`
  kSignalled,      // by `signal`, which neither a limit nor its sandbox's end was the reason for
  kTimeLimit,      // killed at its timeout, or out of processor time
  kMemoryLimit,    // killed by the kernel at the memory limit
  kOutputLimit,    // killed for the size of its output or of a file
  kForbiddenCall,  // killed for a system call that it may not make
  kCannotStart,    // there was no program to run, or it cannot be executed: `exit_code` 127 or 126
  kSandboxDied,    // the sandbox ended while it ran, and so did it
};
// "exited", "signalled", "time limit", ...
std::string_view EndingName(ExecEnding ending);

struct ExecResult {
  ExecEnding ending = ExecEnding::kExited;
  int exit_code = 0;
  int signal = 0;
  std::string standard_output;  // the beginning, up to kept_output
  std::string standard_error;
  uint64_t output_bytes = 0;  // of both, with what was not kept
  std::chrono::microseconds wall_time{0};
  std::chrono::microseconds cpu_time{0};
  uint64_t peak_memory = 0;  // bytes; 0: not known
  // Processes of the sandbox that the kernel killed at the memory limit meanwhile: the program may
  // have survived a child of its own.
  uint64_t memory_kills = 0;
  std::string detail;  // one line more for people, or empty
  std::vector<agent::CallFile> files_out;

  // "accepted" (exit code 0), "non-zero exit", or the ending's name, as programs that judge others
  // call it; kSandboxDied is "internal error".
  std::string_view Verdict() const;
  // As a shell has it: the exit code, or 128 + the signal.
  int ShellCode() const;
};

// Of a tree that went in or out.
struct CopyCount {
  uint64_t entries = 0;
  uint64_t bytes = 0;
  uint64_t skipped = 0;  // sockets, FIFOs and devices do not go over
};

struct SandboxStats {
  uint64_t memory_bytes = 0;
  uint64_t memory_peak_bytes = 0;
  uint64_t memory_kills = 0;
  std::chrono::microseconds cpu_time{0};
  uint64_t processes = 0;
  uint64_t disk_bytes = 0;  // written, as far as it takes space
  uint64_t running_execs = 0;
  std::chrono::milliseconds uptime{0};
  std::vector<std::string> sessions;
};

struct Capabilities {
  bool sessions = false;
  bool files = false;       // put and get while it runs
  bool call_files = false;  // ExecRequest::files_in and files_out
  bool pause = false;
  bool disk_snapshot = false;
  bool memory_snapshot = false;
  bool own_kernel = false;
  bool root = false;  // programs may be root inside
  bool host_network = false;
  bool disk_limit = false;
};

enum class SandboxState { kRunning, kPaused, kDead };
std::string_view StateName(SandboxState state);

// Thread-safe. Going away leaves the sandbox as it is.
class Sandbox {
 public:
  virtual ~Sandbox() = default;

  virtual const std::string& id() const = 0;
  virtual Capabilities capabilities() const = 0;
  virtual SandboxState State() = 0;

  // Runs a program to its end. An error means that it is not known to have run: a bad request,
  // kFailedPrecondition for a paused sandbox or a busy session, kPermissionDenied for a session of
  // another user, kNotFound for a sandbox that has ended, kResourceExhausted for one that has no room
  // for another program, kDeadlineExceeded for one that takes no requests. A commit or snapshot that
  // is made meanwhile holds it up, and no more.
  virtual absl::StatusOr<ExecResult> Exec(const ExecRequest& request) = 0;
  virtual absl::Status CloseSession(const std::string& name) = 0;

  // A file, directory or symbolic link of the host becomes `to`, whose directory must be there. In
  // the sandbox it belongs to the sandbox's user. Directories are merged, files replaced.
  virtual absl::StatusOr<CopyCount> CopyIn(const std::string& from, const std::string& to) = 0;
  // The other way. Whatever the sandbox does, nothing but `to` and what is below it is written, and
  // at most `max_bytes`.
  virtual absl::StatusOr<CopyCount> CopyOut(const std::string& from, const std::string& to,
                                            uint64_t max_bytes = uint64_t{64} << 30) = 0;
  virtual absl::Status WriteFile(const std::string& path, std::string_view content,
                                 uint32_t mode = 0644) = 0;
  // kResourceExhausted for more than `max_bytes`.
  virtual absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t max_bytes) = 0;

  // Stops the processor for all of it, and lets it go on. Both do nothing if it is so already.
  virtual absl::Status Pause() = 0;
  virtual absl::Status Resume() = 0;

  // Keeps the disk, as it is at one moment, under a name, to start others from; with `memory_snapshot`
  // the memory as well, and others go on from that moment, but for programs whose callers stay behind.
  // kAlreadyExists if there is one of that name.
  virtual absl::Status Snapshot(const std::string& name) = 0;

  virtual absl::StatusOr<SandboxStats> Stats() = 0;

  // Kills all processes and removes what it had. Does nothing if that was done.
  virtual absl::Status Stop() = 0;
};

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_SANDBOX_H_
