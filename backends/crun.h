// SPDX-License-Identifier: Apache-2.0
//
// Runs a bundle with crun in the foreground.
#ifndef LAMINA_BACKENDS_CRUN_H_
#define LAMINA_BACKENDS_CRUN_H_

#include <string>

#include "chunkstore/base/status.h"

namespace lamina::backends {

// Runs the bundle as container `id` with this process' standard streams and returns its exit code, 128
// + n if it was ended by signal n; 127 if its program is not there, 126 if it cannot be executed, 1
// if crun fails otherwise, which it then says on standard error. Signals that arrive meanwhile are
// passed on to the container, but for those that concern this process alone (faults, job control);
// the second SIGTERM or SIGINT kills it. `lock` is a descriptor that crun keeps open, so that a lock
// on it lasts as long as the container even if this process is killed. The container is deleted
// before this returns. kNotFound if there is no crun.
absl::StatusOr<int> RunWithCrun(const std::string& bundle, const std::string& id, int lock);

// Kills the container if it still runs and forgets it; does nothing if there is none.
void DeleteContainer(const std::string& id);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_CRUN_H_
