// SPDX-License-Identifier: Apache-2.0
//
// Runs a bundle with crun in the foreground.
#ifndef LAMINA_BACKENDS_CRUN_H_
#define LAMINA_BACKENDS_CRUN_H_

#include <string>

#include "chunkstore/base/status.h"

namespace lamina::backends {

// Runs the bundle as container `id` with this process' standard streams and returns its exit code,
// 128 + n if it was ended by signal n. SIGTERM, SIGINT and SIGHUP that arrive meanwhile are passed
// on to it. The container is deleted before this returns. kNotFound if there is no crun.
absl::StatusOr<int> RunWithCrun(const std::string& bundle, const std::string& id);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_CRUN_H_
