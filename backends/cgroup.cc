// SPDX-License-Identifier: Apache-2.0
#include "backends/cgroup.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <set>
#include <sstream>

#include "backends/agent/pseudo_file.h"

namespace lamina::backends {
namespace {

namespace fs = std::filesystem;
using agent::ReadPseudoFile;
using std::chrono::steady_clock;

constexpr std::string_view kRoot = "/sys/fs/cgroup";
constexpr std::chrono::seconds kPatience{10};
constexpr uint64_t kCpuPeriod = 100'000;  // microseconds
// Those of version 1 that are used.
constexpr const char* kControllers[] = {"memory", "cpu", "cpuacct", "pids", "freezer"};

constexpr std::string_view kPrograms = "programs";  // in a group: see MakePrograms
constexpr std::string_view kStarter = "starter";    // the same: see LimitPrograms

bool Exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// Waits until `done`; false if that takes too long.
template <typename Condition>
bool WaitFor(Condition done) {
  const auto deadline = steady_clock::now() + kPatience;
  int pause_ms = 0;
  while (!done()) {
    if (steady_clock::now() > deadline) return false;
    ::poll(nullptr, 0, pause_ms);
    pause_ms = std::min(pause_ms + 1, 10);
  }
  return true;
}

absl::Status WriteText(const std::string& path, std::string_view text) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, "open " + path);
  const UniqueFd owned(fd);
  if (::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return ErrnoStatus(errno, fmt::format("write {} to {}", text, path));
  }
  return absl::OkStatus();
}

// Version 2: a group has a controller only if the one above hands it down.
void HandDown(const std::string& directory) {
  for (const char* controller : {"+memory", "+cpu", "+pids"}) {
    WriteText(directory + "/cgroup.subtree_control", controller).IgnoreError();
  }
}

// Version 2.
bool HasController(const std::string& directory, std::string_view controller) {
  std::istringstream words(ReadPseudoFile(directory + "/cgroup.controllers"));
  std::string word;
  while (words >> word) {
    if (word == controller) return true;
  }
  return false;
}

absl::Status MakeDirectories(const std::string& root, const std::string& name, bool hand_down) {
  std::string path = root;
  std::istringstream parts(name);
  std::string part;
  while (std::getline(parts, part, '/')) {
    if (hand_down) HandDown(path);
    path += "/" + part;
    if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) {
      return ErrnoStatus(errno, "make control group " + path);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckName(const std::string& name) {
  if (name.empty() || name.starts_with('/') || name.find("..") != std::string::npos) {
    return absl::InvalidArgumentError(fmt::format("'{}' is no name of a control group", name));
  }
  return absl::OkStatus();
}

// Groups inside first.
absl::Status RemoveTree(const std::string& directory) {
  if (::rmdir(directory.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->is_directory(error)) RETURN_IF_ERROR(RemoveTree(entry->path()));
  }
  // Its processes may be on their way out still.
  int failed = 0;
  const bool removed = WaitFor([&] {
    if (::rmdir(directory.c_str()) == 0 || errno == ENOENT) return true;
    failed = errno;
    return failed != EBUSY;
  });
  if (removed && !Exists(directory)) return absl::OkStatus();
  return ErrnoStatus(failed, "remove control group " + directory);
}

// Waits until all of them have ended, or for the time.
void AwaitEnds(std::vector<UniqueFd> processes, std::chrono::milliseconds time) {
  const auto deadline = steady_clock::now() + time;
  while (!processes.empty()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) return;
    std::vector<pollfd> waits;
    for (const UniqueFd& process : processes) waits.push_back({process.get(), POLLIN, 0});
    if (::poll(waits.data(), waits.size(), static_cast<int>(left.count())) < 0) continue;
    size_t index = 0;
    std::erase_if(processes, [&](const UniqueFd&) { return waits[index++].revents != 0; });
  }
}

void CollectProcesses(const std::string& directory, std::set<pid_t>& found) {
  std::istringstream lines(ReadPseudoFile(directory + "/cgroup.procs"));
  pid_t pid = 0;
  while (lines >> pid) {
    if (pid > 0) found.insert(pid);
  }
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->is_directory(error)) CollectProcesses(entry->path(), found);
  }
}

}  // namespace

absl::StatusOr<int> Cgroup::Version() {
  if (Exists(fmt::format("{}/memory/memory.limit_in_bytes", kRoot)) ||
      Exists(fmt::format("{}/memory/cgroup.procs", kRoot))) {
    return 1;
  }
  if (Exists(fmt::format("{}/cgroup.controllers", kRoot))) return 2;
  return absl::FailedPreconditionError(fmt::format("no control groups are mounted at {}", kRoot));
}

absl::StatusOr<Cgroup> Cgroup::Of(const std::string& name) {
  RETURN_IF_ERROR(CheckName(name));
  ASSIGN_OR_RETURN(const int version, Version());
  std::map<std::string, std::string> directories;
  if (version == 2) {
    directories[""] = fmt::format("{}/{}", kRoot, name);
  } else {
    for (const char* controller : kControllers) {
      const std::string tree = fmt::format("{}/{}", kRoot, controller);
      if (Exists(tree + "/cgroup.procs")) directories[controller] = tree + "/" + name;
    }
  }
  return Cgroup(version, name, std::move(directories));
}

absl::StatusOr<std::optional<Cgroup>> Cgroup::OfProcess(pid_t process) {
  ASSIGN_OR_RETURN(const int version, Version());
  const std::string path = fmt::format("/proc/{}/cgroup", process);
  std::istringstream lines(ReadPseudoFile(path));
  // Lines are "NUMBER:CONTROLLER,CONTROLLER:PATH", of version 2 "0::PATH" (cgroups(7)).
  std::string line;
  bool found = false;
  while (std::getline(lines, line)) {
    found = true;
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers.find(version == 2 ? ",," : ",freezer,") == std::string::npos) continue;
    std::string name = line.substr(second + 1);
    if (name.size() < 2) return std::nullopt;
    // A sandbox is one group, for whoever freezes and locks it.
    for (const std::string_view part : {kPrograms, kStarter}) {
      const std::string inside = fmt::format("/{}", part);
      if (name.starts_with("/lamina/") && name.ends_with(inside)) {
        name.erase(name.size() - inside.size());
      }
    }
    ASSIGN_OR_RETURN(Cgroup group, Of(name.substr(1)), "process {}", process);
    return group;
  }
  if (found) return std::nullopt;
  return absl::NotFoundError(fmt::format("there is no process {}", process));
}

absl::StatusOr<Cgroup> Cgroup::Create(const std::string& name, const Limits& limits) {
  ASSIGN_OR_RETURN(Cgroup group, Of(name));
  for (const auto& [controller, directory] : group.directories_) {
    RETURN_IF_ERROR(MakeDirectories(directory.substr(0, directory.size() - name.size() - 1), name,
                                    group.version_ == 2));
  }
  RETURN_IF_ERROR(group.Limit(limits), "control group {}", name);
  return group;
}

std::string Cgroup::File(std::string_view controller, std::string_view file) const {
  const auto directory = directories_.find(version_ == 2 ? "" : std::string(controller));
  if (directory == directories_.end()) return "";
  return fmt::format("{}/{}", directory->second, file);
}

absl::Status Cgroup::Write(std::string_view controller, std::string_view file,
                           std::string_view text) const {
  const std::string path = File(controller, file);
  if (path.empty() || !Exists(path)) {
    return absl::UnimplementedError(
        fmt::format("this machine has no control of {} ({})", controller, file));
  }
  return WriteText(path, text);
}

uint64_t Cgroup::ReadNumber(std::string_view controller, std::string_view file,
                            std::string_view key) const {
  std::istringstream words(ReadPseudoFile(File(controller, file)));
  std::string word;
  uint64_t value = 0;
  if (key.empty()) return words >> value ? value : 0;
  while (words >> word) {
    if (word == key) return words >> value ? value : 0;
  }
  return 0;
}

absl::Status Cgroup::Limit(const Limits& limits) const {
  const bool v2 = version_ == 2;
  if (limits.memory_bytes > 0) {
    const std::string bytes = std::to_string(limits.memory_bytes);
    RETURN_IF_ERROR(Write("memory", v2 ? "memory.max" : "memory.limit_in_bytes", bytes));
    // Swap counts as well, where it is counted at all.
    const absl::Status swap = v2 ? Write("memory", "memory.swap.max", "0")
                                 : Write("memory", "memory.memsw.limit_in_bytes", bytes);
    if (!swap.ok() && !absl::IsUnimplemented(swap)) return swap;
  }
  if (limits.processes > 0) {
    RETURN_IF_ERROR(Write("pids", "pids.max", std::to_string(limits.processes)));
  }
  if (limits.cpu_millis > 0) {
    const uint64_t quota = limits.cpu_millis * (kCpuPeriod / 1000);
    if (v2) return Write("cpu", "cpu.max", fmt::format("{} {}", quota, kCpuPeriod));
    RETURN_IF_ERROR(Write("cpu", "cpu.cfs_period_us", std::to_string(kCpuPeriod)));
    return Write("cpu", "cpu.cfs_quota_us", std::to_string(quota));
  }
  return absl::OkStatus();
}

absl::Status Cgroup::Add(pid_t process) const {
  for (const auto& [controller, directory] : directories_) {
    RETURN_IF_ERROR(WriteText(directory + "/cgroup.procs", std::to_string(process)));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> Cgroup::MakePrograms() const {
  const std::string programs = File("pids", kPrograms);
  // A group of version 2 has what was handed down to it.
  if (programs.empty() || (version_ == 2 && !HasController(File("", ""), "pids"))) {
    return absl::UnimplementedError("this machine has no control of the number of processes");
  }
  if (::mkdir(programs.c_str(), 0755) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "make control group " + programs);
  }
  return OpenFile(programs + "/cgroup.procs", O_WRONLY);
}

absl::Status Cgroup::LimitPrograms(pid_t starter, uint64_t processes) const {
  if (version_ == 2) {
    const std::string own = File("", kStarter);
    if (::mkdir(own.c_str(), 0755) != 0 && errno != EEXIST) {
      return ErrnoStatus(errno, "make control group " + own);
    }
    RETURN_IF_ERROR(WriteText(own + "/cgroup.procs", std::to_string(starter)));
    // Nothing but this: memory that is counted further down is not counted as this group's own.
    RETURN_IF_ERROR(WriteText(File("", "cgroup.subtree_control"), "+pids"));
  }
  return WriteText(File("pids", fmt::format("{}/pids.max", kPrograms)), std::to_string(processes));
}

std::string Cgroup::MemoryEventsFile() const {
  // Local: not of groups below, as with version 1.
  return File("memory", version_ == 2 ? "memory.events.local" : "memory.oom_control");
}
std::string Cgroup::MemoryPeakFile() const {
  return File("memory", version_ == 2 ? "memory.peak" : "memory.max_usage_in_bytes");
}
std::string Cgroup::MemoryUsageFile() const {
  return File("memory", version_ == 2 ? "memory.current" : "memory.usage_in_bytes");
}

uint64_t Cgroup::MemoryKills() const {
  return version_ == 2 ? ReadNumber("memory", "memory.events.local", "oom_kill")
                       : ReadNumber("memory", "memory.oom_control", "oom_kill");
}

absl::StatusOr<CgroupUsage> Cgroup::Usage() const {
  CgroupUsage usage;
  usage.memory_kills = MemoryKills();
  usage.processes = Processes().size();
  if (version_ == 2) {
    usage.memory_bytes = ReadNumber("memory", "memory.current");
    usage.memory_peak_bytes = ReadNumber("memory", "memory.peak");  // Linux 5.19
    usage.cpu_time = std::chrono::microseconds(ReadNumber("cpu", "cpu.stat", "usage_usec"));
  } else {
    usage.memory_bytes = ReadNumber("memory", "memory.usage_in_bytes");
    usage.memory_peak_bytes = ReadNumber("memory", "memory.max_usage_in_bytes");
    usage.cpu_time = std::chrono::microseconds(ReadNumber("cpuacct", "cpuacct.usage") / 1000);
  }
  return usage;
}

std::vector<pid_t> Cgroup::Processes() const {
  std::set<pid_t> found;
  // With version 1 somebody else, like systemd, may have moved one out of some of the trees.
  for (const auto& [controller, directory] : directories_) CollectProcesses(directory, found);
  return {found.begin(), found.end()};
}

absl::StatusOr<UniqueFd> Cgroup::Lock() const {
  const std::string directory = File("freezer", "");
  if (directory.empty()) return absl::UnimplementedError("this machine cannot freeze processes");
  ASSIGN_OR_RETURN(UniqueFd lock, OpenFile(directory, O_RDONLY | O_DIRECTORY));
  while (::flock(lock.get(), LOCK_EX) != 0) {
    if (errno != EINTR) return ErrnoStatus(errno, "lock " + directory);
  }
  return lock;
}

bool Cgroup::Frozen() const {
  if (version_ == 2) return ReadNumber("", "cgroup.events", "frozen") == 1;
  return ReadPseudoFile(File("freezer", "freezer.state")).starts_with("FROZEN");
}

std::pair<std::string, std::string> Cgroup::ThawFile() const {
  if (version_ == 2) return {File("", "cgroup.freeze"), "0"};
  return {File("freezer", "freezer.state"), "THAWED"};
}

absl::Status Cgroup::SetFrozen(bool frozen) const {
  const bool v2 = version_ == 2;
  const char* file = v2 ? "cgroup.freeze" : "freezer.state";
  const char* text = v2 ? (frozen ? "1" : "0") : (frozen ? "FROZEN" : "THAWED");
  RETURN_IF_ERROR(Write("freezer", file, text));
  // Version 1 may need to be told again if processes were just made.
  const bool reached = WaitFor([&] {
    if (Frozen() == frozen) return true;
    if (!v2) Write("freezer", file, text).IgnoreError();
    return false;
  });
  if (reached) return absl::OkStatus();
  return absl::DeadlineExceededError(frozen ? "its processes do not freeze"
                                            : "its processes stay frozen");
}

absl::Status Cgroup::Freeze() const {
  absl::Status frozen = SetFrozen(true);
  if (!frozen.ok()) {
    const auto [file, text] = ThawFile();
    WriteText(file, text).IgnoreError();
  }
  return frozen;
}
absl::Status Cgroup::Thaw() const { return SetFrozen(false); }

absl::Status Cgroup::KillAll() const {
  // All are in one tree, unless somebody else, like systemd, has moved some; that is looked at last.
  const auto freezer = directories_.find("freezer");
  const bool can_freeze = version_ == 1 && freezer != directories_.end();
  const std::string& tree = can_freeze ? freezer->second : directories_.begin()->second;
  const auto deadline = steady_clock::now() + kPatience;
  bool is_first = true;
  while (true) {
    std::set<pid_t> listed;
    CollectProcesses(tree, listed);
    std::vector<pid_t> left(listed.begin(), listed.end());
    if (left.empty()) left = Processes();
    if (left.empty()) return absl::OkStatus();
    if (steady_clock::now() > deadline) {
      return absl::DeadlineExceededError(
          fmt::format("{} processes do not end, the first is {}", left.size(), left.front()));
    }
    // Those that are left are frozen while they are counted and killed: a fork bomb would be faster
    // otherwise. With version 1 frozen ones die only once they are thawed.
    if (can_freeze && !is_first) {
      Write("freezer", "freezer.state", "FROZEN").IgnoreError();
      left = Processes();
    }
    constexpr size_t kAwaited = 64;  // at a time: each takes a descriptor
    std::vector<UniqueFd> awaited;
    for (const pid_t pid : left) {
      if (awaited.size() < kAwaited) {
        UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // Linux 5.3
        if (process.valid()) awaited.push_back(std::move(process));
      }
      ::kill(pid, SIGKILL);
    }
    if (version_ == 2 && is_first && Exists(File("", "cgroup.kill"))) {  // Linux 5.14
      RETURN_IF_ERROR(Write("", "cgroup.kill", "1"));
    }
    if (can_freeze) Write("freezer", "freezer.state", "THAWED").IgnoreError();
    if (awaited.empty()) ::poll(nullptr, 0, 1);
    constexpr std::chrono::milliseconds kPass{100};
    AwaitEnds(std::move(awaited), kPass);
    is_first = false;
  }
}

absl::Status Cgroup::Remove() const {
  RETURN_IF_ERROR(KillAll());
  for (const auto& [controller, directory] : directories_) {
    if (Exists(directory)) RETURN_IF_ERROR(RemoveTree(directory));
  }
  if (version_ == 2) return absl::OkStatus();
  // A runtime makes them in the trees of the other controllers as well.
  const std::string& known = directories_.begin()->second;
  const std::string tree = fmt::format("{}/{}", kRoot, directories_.begin()->first);
  const std::string name = known.substr(tree.size());
  std::error_code error;
  for (fs::directory_iterator entry(kRoot, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string other = entry->path().string() + name;
    if (Exists(other)) RETURN_IF_ERROR(RemoveTree(other));
  }
  return absl::OkStatus();
}

}  // namespace lamina::backends
