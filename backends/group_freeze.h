// SPDX-License-Identifier: Apache-2.0
//
// Stops what runs on a mounted file system for a moment, to read it as it is at one time.
#ifndef LAMINA_BACKENDS_GROUP_FREEZE_H_
#define LAMINA_BACKENDS_GROUP_FREEZE_H_

#include <string>
#include <vector>

#include "backends/cgroup.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::backends {

// The control groups of the processes that have what is mounted at `target` as their root directory,
// and of all that are in a mount name space with them: containers, whoever started them. Processes of
// the host that use files there are not found. kFailedPrecondition, naming one, if a process cannot be
// stopped without stopping others, because its group is theirs as well.
absl::StatusOr<std::vector<Cgroup>> GroupsOnMount(const std::string& target);

// Freezes groups and lets them go on when it goes; also if this process is killed meanwhile: a child
// waits for that. Groups that are frozen already stay so. From Begin to End nobody else who asks for a
// group's lock freezes it or lets it go on: Begin waits for them.
class GroupFreeze {
 public:
  explicit GroupFreeze(std::vector<Cgroup> groups);
  GroupFreeze(const GroupFreeze&) = delete;
  GroupFreeze& operator=(const GroupFreeze&) = delete;
  ~GroupFreeze() { End(); }

  absl::Status Begin();
  void End();

 private:
  absl::Status StartGuard();

  const std::vector<Cgroup> groups_;  // by name: all lock them in the same order
  std::vector<UniqueFd> locks_;       // the guard has them as well
  std::vector<Cgroup> frozen_;        // by this object
  UniqueFd guard_pipe_;               // closed: the guard ends
  pid_t guard_ = 0;
};

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_GROUP_FREEZE_H_
