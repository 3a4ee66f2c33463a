// SPDX-License-Identifier: Apache-2.0
//
// Runs bundles with crun, or another OCI runtime that takes the same commands.
#ifndef LAMINA_BACKENDS_CRUN_H_
#define LAMINA_BACKENDS_CRUN_H_

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::backends {

// Runs the bundle as container `id` with this process' standard streams and returns its exit code,
// 128 + n if it was ended by signal n, 1 if crun fails, which it then says on standard error. Signals
// that arrive meanwhile are passed on to the container, but for those that concern this process alone
// (faults, job control); the second SIGTERM or SIGINT kills it. `lock` is a descriptor that crun
// keeps open, so that a lock on it lasts as long as the container even if this process is killed. The
// container is deleted before this returns. kNotFound if there is no crun.
absl::StatusOr<int> RunWithCrun(const std::string& bundle, const std::string& id, int lock);

struct DetachedContainer {
  std::string runtime = "crun";  // or "runc"
  std::string bundle;
  std::string id;
  std::string root;  // where the runtime keeps what it knows of it; removed with the container
  std::vector<int> descriptors;  // become descriptors 3, 4, ... of the container's first process
  int lock = -1;  // the runtime keeps it open, so that a lock on it lasts as long as it works
};
// Starts a container and returns when its first process runs, with its number. It has no standard
// streams. Its control groups are made by the runtime; who removes them, after killing what is in
// them, and `root`, has removed the container. Errors have what the runtime said. kNotFound if there
// is no such runtime.
absl::StatusOr<pid_t> StartDetached(const DetachedContainer& container);

// Where a program is on PATH; empty if it is not there.
std::string PathOf(std::string_view program);
bool IsOnPath(std::string_view program);

// Kills the container if it still runs and forgets it; does nothing if there is none.
void DeleteContainer(const std::string& id);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_CRUN_H_
