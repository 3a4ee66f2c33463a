// SPDX-License-Identifier: Apache-2.0
#include "backends/launcher.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "backends/agent_client.h"
#include "backends/agent_sandbox.h"
#include "backends/oci_bundle.h"
#include "chunkstore/base/remove_tree.h"
#include "fs/engine/messages.h"
#include "fs/engine/socket.h"

namespace lamina::backends {
namespace {

absl::StatusOr<std::string> NewId() {
  uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) {
    return ErrnoStatus(errno, "getrandom");
  }
  return fmt::format("s{:012x}", number & 0xffffffffffff);
}

absl::Status MakeParent(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return absl::InternalError(fmt::format("make {}: {}", path, error.message()));
  ::chmod(path.c_str(), 0700);
  return absl::OkStatus();
}

absl::Status NoSandbox(std::string_view id) {
  return absl::NotFoundError(fmt::format("there is no sandbox {}", id));
}

bool IsId(std::string_view id) {
  return id.size() == 13 && id[0] == 's' &&
         id.find_first_not_of("0123456789abcdef", 1) == std::string_view::npos;
}

std::vector<std::string> Ids(const std::string& directory) {
  std::vector<std::string> ids;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    std::string id = entry->path().filename();
    if (IsId(id)) ids.push_back(std::move(id));
  }
  std::ranges::sort(ids);
  return ids;
}

absl::Status CheckOptions(const Backend& backend, const SandboxOptions& options) {
  const Capabilities can = backend.capabilities();
  const auto refuse = [&backend](std::string_view what) {
    return absl::UnimplementedError(fmt::format("backend {} has no {}", backend.name(), what));
  };
  if (options.network == Network::kHost && !can.host_network) return refuse("host network");
  if (options.limits.disk_bytes > 0 && !can.disk_limit) return refuse("limit of the disk");
  if (!options.snapshot.empty() && !can.disk_snapshot) return refuse("snapshots");
  if (!options.user.empty() && !can.root) return refuse("choice of users");
  if (options.image.empty() == options.snapshot.empty()) {
    return absl::InvalidArgumentError("say either an image or a snapshot");
  }
  return absl::OkStatus();
}

// What runs in memory goes on as it was: in the same kind of sandbox, with the same limits.
absl::Status CheckSnapshot(const Record& from, const Record& wanted) {
  if (from.backend != wanted.backend) {
    return absl::InvalidArgumentError(
        fmt::format("the snapshot is of backend {}, not {}", from.backend, wanted.backend));
  }
  const auto differs = [](uint64_t asked, uint64_t was) { return asked != 0 && asked != was; };
  if (differs(wanted.limits.memory_bytes, from.limits.memory_bytes) ||
      differs(wanted.limits.cpu_millis, from.limits.cpu_millis) ||
      differs(wanted.limits.processes, from.limits.processes) ||
      differs(wanted.limits.disk_bytes, from.limits.disk_bytes) ||
      (!wanted.runtime.empty() && wanted.runtime != from.runtime)) {
    return absl::InvalidArgumentError(
        "a machine that starts from a snapshot has the limits, and the runtime, that it had");
  }
  return absl::OkStatus();
}

// A sandbox's directory that was made, and its lock.
struct NewDirectory {
  std::string id;
  UniqueFd lock;
};

absl::StatusOr<NewDirectory> MakeSandboxDirectory(const std::string& parent) {
  RETURN_IF_ERROR(MakeParent(parent));
  while (true) {
    NewDirectory made;
    ASSIGN_OR_RETURN(made.id, NewId());
    const std::string path = parent + "/" + made.id;
    if (::mkdir(path.c_str(), 0700) != 0) return ErrnoStatus(errno, "make " + path);
    absl::StatusOr<UniqueFd> lock = LockDirectory(path);
    // Whoever removes leftovers may have taken it for one before it was locked.
    if (absl::IsUnavailable(lock.status()) || absl::IsNotFound(lock.status())) continue;
    RETURN_IF_ERROR(lock.status());
    made.lock = *std::move(lock);
    return made;
  }
}

// Removes what a failed creation made.
class Cleanup {
 public:
  Cleanup(const LauncherOptions& options, std::string directory)
      : options_(options), directory_(std::move(directory)) {}
  Cleanup(const Cleanup&) = delete;
  Cleanup& operator=(const Cleanup&) = delete;
  ~Cleanup() {
    if (!directory_.empty()) RemoveSandbox(options_, directory_).IgnoreError();
  }
  void Keep() { directory_.clear(); }

 private:
  const LauncherOptions& options_;
  std::string directory_;
};

}  // namespace

absl::StatusOr<std::string> RootfsOf(const std::string& state, const std::string& id) {
  const std::string rootfs = SandboxesDirectory({.state = state}) + "/" + id + "/rootfs";
  if (IsId(id) && ::access(rootfs.c_str(), F_OK) == 0) return rootfs;
  return absl::NotFoundError(fmt::format("there is no sandbox {} in {}", id, state));
}

// What is known before anything is made.
absl::Status Launcher::Fill(Record& record, const Backend& backend,
                            const SandboxOptions& options) const {
  record.backend = backend.name();
  record.runtime = options.runtime;
  record.reclaim = options.reclaim;
  RETURN_IF_ERROR(SetCreated(record));
  record.ttl_ms = static_cast<uint64_t>(std::max<int64_t>(options.ttl.count(), 0));
  record.idle_ttl_ms = static_cast<uint64_t>(std::max<int64_t>(options.idle_ttl.count(), 0));
  record.limits = options.limits;
  record.network = options.network;
  record.image = options.image;
  record.layers = options.layers;
  if (options.snapshot.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckName(options.snapshot, "snapshot"));
  const absl::StatusOr<Record> from =
      ReadRecord(SnapshotsDirectory(options_) + "/" + options.snapshot);
  if (absl::IsNotFound(from.status())) {
    return absl::NotFoundError(fmt::format("there is no snapshot '{}'", options.snapshot));
  }
  RETURN_IF_ERROR(from.status());
  if (backend.capabilities().memory_snapshot || from->backend != record.backend) {
    RETURN_IF_ERROR(CheckSnapshot(*from, record));
    record.limits = from->limits;
    record.runtime = from->runtime;
    record.reclaim = from->reclaim;
    record.manifest_digest = from->manifest_digest;
  }
  record.image = from->image;
  if (record.layers.empty()) record.layers = from->layers;
  record.from_snapshot = options.snapshot;
  record.environment = from->environment;
  record.working_directory = from->working_directory;
  record.user = from->user;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Sandbox>> Launcher::Create(const Backend& backend,
                                                          const SandboxOptions& options) {
  RETURN_IF_ERROR(CheckOptions(backend, options));
  RETURN_IF_ERROR(backend.Available(), "backend {}", backend.name());
  Record record;
  RETURN_IF_ERROR(Fill(record, backend, options));
  const Capabilities can = backend.capabilities();
  ASSIGN_OR_RETURN(const NewDirectory made, MakeSandboxDirectory(SandboxesDirectory(options_)));
  record.id = made.id;
  record.cgroup = "lamina/" + record.id;
  const std::string directory = DirectoryOf(record.id);
  Cleanup cleanup(options_, directory);
  RETURN_IF_ERROR(WriteRecord(directory, record));
  // Calls write to a /tmp of their own, and nothing else: that is what the limit is for, and where they
  // start unless somebody says otherwise.
  const bool stateless = can.call_files;
  fs::MountDescription mount;
  if (can.own_kernel) {
    ASSIGN_OR_RETURN(mount, MountImage(options_, directory, record, options.registry));
  } else {
    ASSIGN_OR_RETURN(mount, MountRootfs(options_, directory, record, options.registry,
                                        stateless ? 0 : record.limits.disk_bytes));
  }

  if (!options.snapshot.empty() && can.memory_snapshot &&
      record.manifest_digest != mount.manifest_digest) {
    return absl::FailedPreconditionError(
        fmt::format("{} is another image than the snapshot's, which was {}", record.image,
                    record.manifest_digest));
  }
  record.manifest_digest = mount.manifest_digest;
  ASSIGN_OR_RETURN(const oci::ImageConfig config, fs::ConfigOf(mount));

  const std::string rootfs = directory + "/rootfs";
  if (options.snapshot.empty() || !options.user.empty()) {
    ASSIGN_OR_RETURN(record.user,
                     ResolveUser(rootfs, options.user.empty() ? config.user : options.user));
  }
  std::vector<std::string> added = record.environment;
  added.insert(added.end(), options.environment.begin(), options.environment.end());
  ASSIGN_OR_RETURN(record.environment, WithVariables(config.environment, added));
  if (!options.working_directory.empty()) {
    record.working_directory = options.working_directory;
  } else if (stateless) {
    record.working_directory = "/tmp";
  } else if (options.snapshot.empty() && !config.working_directory.empty()) {
    record.working_directory = config.working_directory;
  }

  ASSIGN_OR_RETURN(UniqueFd listener, fs::ListenUnix(directory, kAgentSocket));
  RETURN_IF_ERROR(
      backend.Start({.state = options_.state,
                     .directory = directory,
                     .rootfs = rootfs,
                     .devices = mount.devices,
                     .snapshot = options.snapshot.empty()
                                     ? ""
                                     : SnapshotsDirectory(options_) + "/" + options.snapshot,
                     .helpers = options_.helpers,
                     .listener = listener.get(),
                     .lock = made.lock.get(),
                     .warm = options.warm},
                    record),
      "start {}", backend.name());
  // If it has ended, nobody listens any more, and that is an error here instead of a wait.
  listener.Reset();
  RETURN_IF_ERROR(AgentInfo(directory).status(), "start {}", backend.name());
  record.complete = true;
  RETURN_IF_ERROR(SetCreated(record));  // its time begins now
  RETURN_IF_ERROR(WriteRecord(directory, record));
  cleanup.Keep();
  return MakeAgentSandbox(options_, &backend, std::move(record));
}

absl::StatusOr<std::unique_ptr<Sandbox>> Launcher::Find(const std::string& id) {
  if (!IsId(id)) return NoSandbox(id);
  absl::StatusOr<Record> record = ReadRecord(DirectoryOf(id));
  if (absl::IsNotFound(record.status())) return NoSandbox(id);
  RETURN_IF_ERROR(record.status());
  if (!record->complete) return NoSandbox(id);
  ASSIGN_OR_RETURN(const Backend* backend, FindBackend(record->backend));
  return MakeAgentSandbox(options_, backend, *std::move(record));
}

absl::StatusOr<std::vector<ListedSandbox>> Launcher::List() {
  std::vector<ListedSandbox> listed;
  for (const std::string& id : Ids(SandboxesDirectory(options_))) {
    const absl::StatusOr<std::unique_ptr<Sandbox>> sandbox = Find(id);
    absl::StatusOr<Record> record = sandbox.ok() ? ReadRecord(DirectoryOf(id)) : sandbox.status();
    if (absl::IsNotFound(record.status())) continue;  // half made, or gone
    if (record.ok()) {
      listed.push_back({.record = *std::move(record), .state = (*sandbox)->State()});
    } else {
      listed.push_back({.record = {.id = id}, .problem = record.status()});
    }
  }
  return listed;
}

absl::Status Launcher::Remove(const std::string& id) {
  if (!IsId(id)) return NoSandbox(id);
  const absl::StatusOr<UniqueFd> lock = LockDirectory(DirectoryOf(id), /*wait=*/true);
  if (absl::IsNotFound(lock.status())) return NoSandbox(id);
  RETURN_IF_ERROR(lock.status());
  return Annotate(RemoveSandbox(options_, DirectoryOf(id)), "remove sandbox " + id);
}

bool Launcher::IsLeftover(const std::string& id) {
  const absl::StatusOr<Record> record = ReadRecord(DirectoryOf(id));
  if (absl::IsNotFound(record.status())) return true;
  // An error says nothing about what runs there.
  if (!record.ok()) return false;
  if (!record->complete) return true;
  // One of before the machine started has ended with it.
  const auto age = Age(*record).value_or(std::chrono::milliseconds::max());
  if (record->ttl_ms > 0 && static_cast<uint64_t>(age.count()) > record->ttl_ms) return true;
  if (record->ttl_ms == 0 && record->idle_ttl_ms == 0) return false;
  // Its agent ended it; a sandbox that was killed looks the same.
  const absl::StatusOr<std::unique_ptr<Sandbox>> sandbox = Find(id);
  return sandbox.ok() && (*sandbox)->State() == SandboxState::kDead;
}

absl::Status Launcher::RemoveLeftovers() {
  absl::Status result;
  for (const std::string& id : Ids(SandboxesDirectory(options_))) {
    if (!IsLeftover(id)) continue;
    // Somebody makes or removes it; once it is locked nobody does.
    const absl::StatusOr<UniqueFd> lock = LockDirectory(DirectoryOf(id));
    if (!lock.ok() || !IsLeftover(id)) continue;
    result.Update(
        Annotate(RemoveSandbox(options_, DirectoryOf(id)), "remove what is left of sandbox " + id));
  }
  result.Update(RemoveHalfMadeSnapshots());
  return result;
}

absl::Status Launcher::RemoveHalfMadeSnapshots() const {
  absl::Status result;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(SnapshotsDirectory(options_), error), end;
       !error && entry != end; entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(kHalfMadeSnapshot)) continue;
    // Whoever makes it has the lock.
    const absl::StatusOr<UniqueFd> lock = LockDirectory(entry->path());
    if (lock.ok()) result.Update(RemoveTree(entry->path()));
  }
  return result;
}

absl::StatusOr<std::vector<std::string>> Launcher::Snapshots() {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(SnapshotsDirectory(options_), error), end;
       !error && entry != end; entry.increment(error)) {
    std::string name = entry->path().filename();
    if (CheckName(name, "snapshot").ok()) names.push_back(std::move(name));
  }
  std::ranges::sort(names);
  return names;
}

absl::Status Launcher::RemoveSnapshot(const std::string& name) {
  RETURN_IF_ERROR(CheckName(name, "snapshot"));
  const std::string path = SnapshotsDirectory(options_) + "/" + name;
  if (::access(path.c_str(), F_OK) != 0) {
    return absl::NotFoundError(fmt::format("there is no snapshot '{}'", name));
  }
  return RemoveTree(path);
}

}  // namespace lamina::backends
