// SPDX-License-Identifier: Apache-2.0
//
// A control group of either version: limits, what was used, freezing, and the end of all in it.
//
// Version 2 has one directory, version 1 one in each controller's tree; both have the same name. Where
// both are mounted, version 1 is used if it has the memory controller. Kernel documentation:
// admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/.
#ifndef LAMINA_BACKENDS_CGROUP_H_
#define LAMINA_BACKENDS_CGROUP_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/sandbox.h"
#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::backends {

struct CgroupUsage {
  uint64_t memory_bytes = 0;
  uint64_t memory_peak_bytes = 0;
  uint64_t memory_kills = 0;
  std::chrono::microseconds cpu_time{0};
  uint64_t processes = 0;
};

// Thread-safe.
class Cgroup {
 public:
  // Which version holds on this machine: 1 or 2; kFailedPrecondition if there is none.
  static absl::StatusOr<int> Version();

  // The group of this name ("lamina/x1"), made if it is not there. kUnimplemented for a limit whose
  // controller this machine lacks.
  static absl::StatusOr<Cgroup> Create(const std::string& name, const Limits& limits);
  // The same without making it or looking whether it is there.
  static absl::StatusOr<Cgroup> Of(const std::string& name);
  // The group that a process is in, as far as freezing goes; nothing if it is in none but the one of
  // all processes. A sandbox's group for those in parts of it. kNotFound if there is no such process.
  static absl::StatusOr<std::optional<Cgroup>> OfProcess(pid_t process);
  const std::string& name() const { return name_; }

  absl::Status Add(pid_t process) const;

  // Counts the processes that somebody starts apart from the starter's own, who can thus go on when
  // they are as many as they may be. Memory and processor time stay this group's, of both together.
  //
  // MakePrograms makes a group below this one and returns its open cgroup.procs: whoever writes "0"
  // to it moves there, and what he forks is born there. Linux lets processes move into a group that is
  // full; only forks fail there. LimitPrograms sets the limit. It is called once `starter` runs, the
  // one process in this group: with version 2 he moves to a group of his own, since one that has
  // processes cannot divide what it has (admin-guide/cgroup-v2.rst, "No Internal Process Constraint").
  // kUnimplemented if this machine does not count processes.
  absl::StatusOr<UniqueFd> MakePrograms() const;
  absl::Status LimitPrograms(pid_t starter, uint64_t processes) const;

  absl::StatusOr<CgroupUsage> Usage() const;
  // How many processes the kernel killed here for want of memory; 0 if it does not say.
  uint64_t MemoryKills() const;
  std::vector<pid_t> Processes() const;
  // Files for who has to read them where there are no paths. Those of events and of version 1's
  // oom_control have a line "oom_kill N"; the others are one number.
  std::string MemoryEventsFile() const;
  std::string MemoryPeakFile() const;
  std::string MemoryUsageFile() const;

  // Waits for whoever else stops the group's processes for a time, or lets them go on, and keeps others
  // from it. It lasts as long as the descriptor and its copies. Freeze and Thaw do not ask for it.
  absl::StatusOr<UniqueFd> Lock() const;
  // Version 1 answers when all are frozen; version 2 as well, by cgroup.events. If not all can be frozen
  // none stays so.
  absl::Status Freeze() const;
  absl::Status Thaw() const;
  bool Frozen() const;
  // The file to write to, and the text that lets them go on: for who can do no more than that.
  std::pair<std::string, std::string> ThawFile() const;

  // Kills all processes in it, frozen or not, until there is none.
  absl::Status KillAll() const;
  // KillAll, and removes it, with the groups that were made in it. OK if it is not there.
  absl::Status Remove() const;

 private:
  Cgroup(int version, std::string name, std::map<std::string, std::string> directories)
      : version_(version), name_(std::move(name)), directories_(std::move(directories)) {}
  absl::Status Limit(const Limits& limits) const;
  std::string File(std::string_view controller, std::string_view file) const;
  absl::Status Write(std::string_view controller, std::string_view file,
                     std::string_view text) const;
  uint64_t ReadNumber(std::string_view controller, std::string_view file,
                      std::string_view key = "") const;
  absl::Status SetFrozen(bool frozen) const;

  int version_;
  std::string name_;
  // Version 1: controller to directory. Version 2: one, under the empty name.
  std::map<std::string, std::string> directories_;
};

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_CGROUP_H_
