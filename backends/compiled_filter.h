// SPDX-License-Identifier: Apache-2.0
//
// The system call filter of containers as crun has compiled it, for those that follow: that takes crun
// longer than most of what else it does, and is the same every time. The filter itself is in each
// container's configuration as well: a runtime that does not know of this compiles that.
#ifndef LAMINA_BACKENDS_COMPILED_FILTER_H_
#define LAMINA_BACKENDS_COMPILED_FILTER_H_

#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina::backends {

// Of one filter (`linux.seccomp` of the runtime specification), compiled by one program, in one boot: it
// is not waited for when it is written, and after a crash of the machine it may be there in part.
class CompiledFilter {
 public:
  // `directory` is one that nobody but root can write to; `crun` the path of the program.
  CompiledFilter(std::string directory, std::string_view filter, const std::string& crun,
                 std::string_view boot_id);

  // For the annotation run.oci.seccomp_bpf_data (crun(1); crun 1.4): base64. Empty if it is not there.
  std::string Text() const;
  // Keeps what crun has compiled for a container that runs, in place of what other programs compiled.
  absl::Status Keep(const std::string& compiled) const;

 private:
  const std::string directory_;
  std::string name_;
};

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_COMPILED_FILTER_H_
