// SPDX-License-Identifier: Apache-2.0
//
// The system call filter of calls, ready for the kernel: made once, loaded by each call's process
// without allocating anything.
#ifndef LAMINA_BACKENDS_FNCALL_FILTER_H_
#define LAMINA_BACKENDS_FNCALL_FILTER_H_

#include <linux/filter.h>

#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::fncall {

class Filter {
 public:
  // What seccomp_profile.h allows is allowed; what it denies ends the process with SIGSYS.
  static absl::StatusOr<Filter> Make();

  // For this process and all it starts. It must have PR_SET_NO_NEW_PRIVS. Returns 0 or an errno.
  int Load() const;

 private:
  explicit Filter(std::vector<sock_filter> program) : program_(std::move(program)) {}
  std::vector<sock_filter> program_;
};

}  // namespace lamina::fncall

#endif  // LAMINA_BACKENDS_FNCALL_FILTER_H_
