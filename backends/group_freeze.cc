// SPDX-License-Identifier: Apache-2.0
#include "backends/group_freeze.h"

#include <fcntl.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <map>
#include <set>

namespace lamina::backends {
namespace {

// What tells whose a process is.
struct ProcessPlace {
  dev_t root = 0;          // of its root directory
  std::string name_space;  // of its mounts
};

std::map<pid_t, ProcessPlace> AllProcesses() {
  std::map<pid_t, ProcessPlace> processes;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    pid_t pid = 0;
    const auto [rest, failed] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (failed != std::errc() || rest != name.data() + name.size()) continue;
    ProcessPlace place;
    struct stat info {};
    // Those of kernel threads, and of processes that have ended, cannot be looked at.
    if (::stat((entry->path() / "root").c_str(), &info) == 0) place.root = info.st_dev;
    std::error_code unreadable;
    place.name_space = std::filesystem::read_symlink(entry->path() / "ns/mnt", unreadable);
    processes.emplace(pid, std::move(place));
  }
  return processes;
}

// The guard: waits until nobody has the other end of the pipe, and lets the groups go on. After fork(2)
// in a process with threads nothing may be called but system calls.
[[noreturn]] void Guard(int pipe, const std::vector<std::pair<std::string, std::string>>& thaw) {
  char byte = 0;
  while (::read(pipe, &byte, 1) < 0 && errno == EINTR) {
  }
  for (const auto& [path, text] : thaw) {
    const int file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (file < 0) continue;  // the group is gone
    [[maybe_unused]] const ssize_t written = ::write(file, text.data(), text.size());
    ::close(file);
  }
  ::_exit(0);
}

}  // namespace

absl::StatusOr<std::vector<Cgroup>> GroupsOnMount(const std::string& target) {
  struct stat mounted {};
  if (::stat(target.c_str(), &mounted) != 0) return ErrnoStatus(errno, "look at " + target);
  const std::map<pid_t, ProcessPlace> processes = AllProcesses();
  const auto own = processes.find(::getpid());
  std::set<std::string> name_spaces;
  const auto is_on_mount = [&](const ProcessPlace& place) {
    return place.root == mounted.st_dev || name_spaces.contains(place.name_space);
  };
  for (const auto& [pid, place] : processes) {
    if (place.root != mounted.st_dev || place.name_space.empty()) continue;
    if (own == processes.end() || place.name_space != own->second.name_space) {
      name_spaces.insert(place.name_space);
    }
  }
  std::map<std::string, Cgroup> groups;
  for (const auto& [pid, place] : processes) {
    if (!is_on_mount(place) || pid == ::getpid()) continue;
    absl::StatusOr<std::optional<Cgroup>> of_process = Cgroup::OfProcess(pid);
    if (absl::IsNotFound(of_process.status())) continue;  // it has ended meanwhile
    RETURN_IF_ERROR(of_process.status());
    const std::optional<Cgroup>& group = *of_process;
    if (!group) {
      return absl::FailedPreconditionError(fmt::format(
          "process {}, which runs on {}, has no control group of its own, and cannot be paused",
          pid, target));
    }
    groups.emplace(group->name(), *group);
  }
  std::vector<Cgroup> found;
  for (const auto& [name, group] : groups) {
    for (const pid_t pid : group.Processes()) {
      const auto other = processes.find(pid);
      if (other == processes.end() || is_on_mount(other->second)) continue;  // or it is new
      return absl::FailedPreconditionError(fmt::format(
          "what runs on {} cannot be paused: process {}, which does not, is in the same "
          "control group {}",
          target, pid, name));
    }
    found.push_back(group);
  }
  return found;
}

GroupFreeze::GroupFreeze(std::vector<Cgroup> groups)
    : groups_([&groups] {
        std::ranges::sort(groups, {}, &Cgroup::name);
        return std::move(groups);
      }()) {}

absl::Status GroupFreeze::StartGuard() {
  std::vector<std::pair<std::string, std::string>> thaw;
  for (const Cgroup& group : frozen_) thaw.push_back(group.ThawFile());
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd theirs(ends[0]);
  guard_pipe_ = UniqueFd(ends[1]);
  // Locked until the groups go on, whoever lets them.
  std::vector<int> kept = {theirs.get()};
  for (const UniqueFd& lock : locks_) kept.push_back(lock.get());
  std::ranges::sort(kept);
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // what ends this process must not end the guard
  guard_ = ::fork();
  if (guard_ == 0) {
    // The other end, and what others wait for.
    unsigned next = STDERR_FILENO + 1;
    for (const int fd : kept) {
      const auto number = static_cast<unsigned>(fd);
      if (number > next) ::close_range(next, number - 1, 0);
      next = std::max(next, number + 1);
    }
    ::close_range(next, ~0U, 0);
    ::setsid();
    Guard(theirs.get(), thaw);
  }
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (guard_ < 0) {
    guard_ = 0;
    return ErrnoStatus(error, "fork");
  }
  return absl::OkStatus();
}

absl::Status GroupFreeze::Begin() {
  for (const Cgroup& group : groups_) {
    absl::StatusOr<UniqueFd> lock = group.Lock();
    if (!lock.ok()) {
      End();
      return Annotate(lock.status(), "control group " + group.name());
    }
    locks_.push_back(*std::move(lock));
  }
  for (const Cgroup& group : groups_) {
    if (!group.Frozen()) frozen_.push_back(group);
  }
  if (frozen_.empty()) return absl::OkStatus();
  absl::Status status = StartGuard();
  for (const Cgroup& group : frozen_) {
    if (status.ok()) status = Annotate(group.Freeze(), "control group " + group.name());
  }
  if (!status.ok()) End();
  return status;
}

void GroupFreeze::End() {
  for (const Cgroup& group : frozen_) {
    if (absl::Status status = group.Thaw(); !status.ok()) {
      spdlog::error("control group {}: {}", group.name(), std::string(status.message()));
    }
  }
  frozen_.clear();
  guard_pipe_.Reset();
  while (guard_ > 0 && ::waitpid(guard_, nullptr, 0) < 0 && errno == EINTR) {
  }
  guard_ = 0;
  locks_.clear();
}

}  // namespace lamina::backends
