// SPDX-License-Identifier: Apache-2.0
//
// The process that lives as long as the mounts do. It starts the worker, which does all the work,
// and starts it again when it dies; it keeps the worker's FUSE descriptors, so that the kernel lets
// readers wait meanwhile. To the worker it is what systemd is to a service (descriptor_holder.h);
// where laminad is started by systemd, it passes the descriptors on, so that mounts outlive it too.
#ifndef LAMINA_TOOLS_LAMINAD_SUPERVISOR_H_
#define LAMINA_TOOLS_LAMINAD_SUPERVISOR_H_

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::daemon {

// A socket that the worker accepts from. It is kept like a descriptor of the worker's: clients wait
// in its queue from one worker to the next.
struct ListeningSocket {
  std::string name;  // under which the worker gets it, after those that systemd passes
  // Called unless systemd passes one at `path`, or any if that is empty.
  std::function<absl::StatusOr<UniqueFd>()> open;
  std::string path;  // of a unix socket that is removed at the end; empty: it is another one
};

struct SupervisorOptions {
  std::string state;                     // directory; its lock is held
  std::vector<ListeningSocket> sockets;  // opened once the lock is held
  std::vector<std::string> command;      // the worker: program and arguments
  // What is run before a worker is asked to hand over. kWrongConfiguration says that the one after it
  // would not start; every other status that it would, or that it is not known.
  std::vector<std::string> check;
  // How long readers may be kept waiting for a worker. After that their mounts are given up, and
  // reads fail.
  std::chrono::milliseconds give_up_after{30'000};
  // How long a worker may take to answer what it was asked before it hands over.
  std::chrono::milliseconds drain_for{10'000};
};

// The exit code of SupervisorOptions::check.
inline constexpr int kWrongConfiguration = 2;

// Runs until SIGTERM or SIGINT. Then all is unmounted, unless systemd keeps the descriptors: then
// mounts stay for the next laminad. SIGHUP has the worker hand over to one that is started from the
// program on the disk, an upgrade for example; if it cannot be started, the program that runs is. A
// configuration that is wrong then is refused: the worker goes on.
// Errors: the state directory cannot be used, the first worker fails, or the mounts were given up.
// For a process with one thread.
absl::Status RunSupervisor(const SupervisorOptions& options);

}  // namespace lamina::daemon

#endif  // LAMINA_TOOLS_LAMINAD_SUPERVISOR_H_
