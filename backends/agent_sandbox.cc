// SPDX-License-Identifier: Apache-2.0
#include "backends/agent_sandbox.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "backends/agent_client.h"
#include "backends/cgroup.h"
#include "backends/mount_commit.h"
#include "chunkstore/base/disk_usage.h"

namespace lamina::backends {
namespace {

class AgentSandbox : public Sandbox {
 public:
  AgentSandbox(LauncherOptions options, const Backend* backend, Record record)
      : options_(std::move(options)),
        backend_(backend),
        record_(std::move(record)),
        directory_(SandboxesDirectory(options_) + "/" + record_.id) {}

  const std::string& id() const override { return record_.id; }
  Capabilities capabilities() const override { return backend_->capabilities(); }
  SandboxState State() override;
  absl::StatusOr<ExecResult> Exec(const ExecRequest& request) override;
  absl::Status CloseSession(const std::string& name) override;
  absl::StatusOr<CopyCount> CopyIn(const std::string& from, const std::string& to) override;
  absl::StatusOr<CopyCount> CopyOut(const std::string& from, const std::string& to,
                                    uint64_t max_bytes) override;
  absl::Status WriteFile(const std::string& path, std::string_view content, uint32_t mode) override;
  absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t max_bytes) override;
  absl::Status Pause() override;
  absl::Status Resume() override;
  absl::Status Snapshot(const std::string& name) override;
  absl::StatusOr<SandboxStats> Stats() override;
  absl::Status Stop() override;

 private:
  // OK if it runs; else an error that says that it does not.
  absl::Status CheckRunning();
  absl::Status CheckCapability(bool has, std::string_view what) const;
  absl::StatusOr<agent::ExecMessage> ToMessage(const ExecRequest& request) const;
  agent::TreeMessage Tree(const std::string& path) const {
    constexpr uint64_t kMaxBytes = uint64_t{1} << 50;
    return {.path = path, .uid = record_.user.uid, .gid = record_.user.gid, .limit = kMaxBytes};
  }
  std::string Name() const { return fmt::format("sandbox {}", record_.id); }

  const LauncherOptions options_;
  const Backend* const backend_;
  const Record record_;
  const std::string directory_;
};

SandboxState AgentSandbox::State() {
  if (backend_->Paused(directory_, record_)) return SandboxState::kPaused;
  return AgentListens(directory_) ? SandboxState::kRunning : SandboxState::kDead;
}

absl::Status AgentSandbox::CheckRunning() {
  switch (State()) {
    case SandboxState::kRunning:
      return absl::OkStatus();
    case SandboxState::kPaused:
      return absl::FailedPreconditionError(fmt::format("{} is paused", Name()));
    case SandboxState::kDead:
      break;
  }
  return absl::NotFoundError(fmt::format("{} has ended", Name()));
}

absl::Status AgentSandbox::CheckCapability(bool has, std::string_view what) const {
  if (has) return absl::OkStatus();
  return absl::UnimplementedError(fmt::format("backend {} has no {}", backend_->name(), what));
}

absl::StatusOr<agent::ExecMessage> AgentSandbox::ToMessage(const ExecRequest& request) const {
  agent::ExecMessage message;
  message.arguments = request.arguments;
  if (message.arguments.empty()) {
    if (request.script.empty()) return absl::InvalidArgumentError("exec: say what to run");
    message.arguments = {"/bin/sh", "-c", request.script};
  }
  User user = record_.user;
  if (!request.user.empty()) {
    RETURN_IF_ERROR(CheckCapability(capabilities().root, "choice of users"));
    ASSIGN_OR_RETURN(user, ResolveUser(directory_ + "/rootfs", request.user));
  }
  ASSIGN_OR_RETURN(message.environment,
                   ProgramEnvironment(record_.environment, request.environment, user));
  message.working_directory =
      request.working_directory.empty() ? record_.working_directory : request.working_directory;
  message.uid = user.uid;
  message.gid = user.gid;
  message.groups = user.additional_gids;
  if (!request.session.empty()) {
    RETURN_IF_ERROR(CheckCapability(capabilities().sessions, "sessions"));
    RETURN_IF_ERROR(CheckName(request.session, "session"));
    message.session = request.session;
  }
  if (!request.files_in.empty() || !request.files_out.empty()) {
    RETURN_IF_ERROR(CheckCapability(capabilities().call_files, "files that go with a call"));
    if (std::max(request.files_in.size(), request.files_out.size()) > agent::kMaxCallFiles) {
      return absl::InvalidArgumentError(
          fmt::format("exec: a call has at most {} files each way", agent::kMaxCallFiles));
    }
  }
  message.has_stdin = request.stdin_fd >= 0 || !request.stdin_text.empty();
  message.timeout_ms = static_cast<uint64_t>(std::max<int64_t>(request.timeout.count(), 0));
  message.cpu_ms = static_cast<uint64_t>(std::max<int64_t>(request.cpu_time.count(), 0));
  message.output_limit = request.output_limit;
  message.file_limit = request.file_limit;
  message.files_in = request.files_in;
  message.files_out = request.files_out;
  return message;
}

absl::StatusOr<ExecResult> AgentSandbox::Exec(const ExecRequest& request) {
  ASSIGN_OR_RETURN(const agent::ExecMessage message, ToMessage(request));
  ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Of(record_.cgroup));
  if (backend_->Paused(directory_, record_))
    return absl::FailedPreconditionError(fmt::format("{} is paused", Name()));
  const uint64_t kills_before = group.MemoryKills();
  // A pool's agent runs outside of the sandbox, and calls wait for their turn.
  absl::StatusOr<ExecResult> result =
      AgentExec(directory_, message, request, {.from_start = capabilities().call_files});
  const bool broke_off = absl::IsAborted(result.status());
  if (absl::IsUnavailable(result.status()) || (broke_off && !AgentListens(directory_))) {
    return absl::NotFoundError(fmt::format("{} has ended", Name()));
  }
  RETURN_IF_ERROR(result.status(), "{}", Name());
  // Counted by the kernel before it kills, so a kill that ended the program is in it.
  const uint64_t kills = group.MemoryKills();
  if (kills > kills_before) {
    result->memory_kills = kills - kills_before;
    if (result->ending == ExecEnding::kSignalled && result->signal == SIGKILL) {
      result->ending = ExecEnding::kMemoryLimit;
    }
  }
  return result;
}

absl::Status AgentSandbox::CloseSession(const std::string& name) {
  RETURN_IF_ERROR(CheckCapability(capabilities().sessions, "sessions"));
  RETURN_IF_ERROR(CheckRunning());
  return AgentCloseSession(directory_, name);
}

absl::StatusOr<CopyCount> AgentSandbox::CopyIn(const std::string& from, const std::string& to) {
  RETURN_IF_ERROR(CheckCapability(capabilities().files, "files that stay"));
  RETURN_IF_ERROR(CheckRunning());
  return AgentPut(directory_, Tree(to), from);
}

absl::StatusOr<CopyCount> AgentSandbox::CopyOut(const std::string& from, const std::string& to,
                                                uint64_t max_bytes) {
  RETURN_IF_ERROR(CheckCapability(capabilities().files, "files that stay"));
  RETURN_IF_ERROR(CheckRunning());
  return AgentGet(directory_, from, to, max_bytes);
}

absl::Status AgentSandbox::WriteFile(const std::string& path, std::string_view content,
                                     uint32_t mode) {
  RETURN_IF_ERROR(CheckCapability(capabilities().files, "files that stay"));
  RETURN_IF_ERROR(CheckRunning());
  return AgentPutFile(directory_, Tree(path), content, mode);
}

absl::StatusOr<std::string> AgentSandbox::ReadFile(const std::string& path, uint64_t max_bytes) {
  RETURN_IF_ERROR(CheckCapability(capabilities().files, "files that stay"));
  RETURN_IF_ERROR(CheckRunning());
  return AgentGetFile(directory_, path, max_bytes);
}

absl::Status AgentSandbox::Pause() {
  RETURN_IF_ERROR(CheckCapability(capabilities().pause, "pause"));
  if (State() == SandboxState::kDead) return CheckRunning();
  return Annotate(backend_->Pause(directory_, record_), Name());
}

absl::Status AgentSandbox::Resume() {
  RETURN_IF_ERROR(CheckCapability(capabilities().pause, "pause"));
  if (State() == SandboxState::kDead) return CheckRunning();
  return Annotate(backend_->Resume(directory_, record_), Name());
}

absl::Status AgentSandbox::Snapshot(const std::string& name) {
  RETURN_IF_ERROR(CheckCapability(capabilities().disk_snapshot, "snapshots"));
  RETURN_IF_ERROR(CheckName(name, "snapshot"));
  const std::string parent = SnapshotsDirectory(options_);
  std::error_code error;
  std::filesystem::create_directories(parent, error);
  if (error) return absl::InternalError(fmt::format("make {}: {}", parent, error.message()));
  const std::string path = parent + "/" + name;
  if (::access(path.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(fmt::format("there is a snapshot '{}'", name));
  }
  if (State() == SandboxState::kDead) return CheckRunning();
  // Whole, or not there. A dot in front: no name of a snapshot.
  ASSIGN_OR_RETURN(TemporaryDirectory making,
                   TemporaryDirectory::Create(parent, kHalfMadeSnapshot));
  // Whoever removes leftovers may have taken it for one before it was locked; then this fails.
  ASSIGN_OR_RETURN(const UniqueFd lock, LockDirectory(making.path()));
  if (capabilities().memory_snapshot) {
    RETURN_IF_ERROR(backend_->Save(directory_, making.path()), "snapshot {} of {}", name, Name());
  } else {
    // On top of the image and its layers; an image that is a snapshot's becomes a part of this one.
    fs::Client client = EngineClient(options_);
    RETURN_IF_ERROR(CommitMount(client, directory_ + "/rootfs",
                                {.destination = "oci:" + making.path() + "/image",
                                 .images_left_out = 1 + record_.layers.size()})
                        .status(),
                    "snapshot {} of {}", name, Name());
  }
  // It fits this image only, wherever the tag leads later.
  Record record = record_;
  ASSIGN_OR_RETURN(const Digest manifest, Digest::Parse(record.manifest_digest));
  ASSIGN_OR_RETURN(record.image, fs::PinReference(record.image, manifest));
  RETURN_IF_ERROR(WriteRecord(making.path(), record));
  if (::rename(making.path().c_str(), path.c_str()) != 0) {
    if (errno == EEXIST || errno == ENOTEMPTY) {
      return absl::AlreadyExistsError(fmt::format("there is a snapshot '{}'", name));
    }
    return ErrnoStatus(errno, "make " + path);
  }
  making.Keep();
  return absl::OkStatus();
}

absl::StatusOr<SandboxStats> AgentSandbox::Stats() {
  ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Of(record_.cgroup));
  const SandboxState state = State();
  if (state == SandboxState::kDead) return CheckRunning();
  SandboxStats stats;
  ASSIGN_OR_RETURN(const CgroupUsage usage, group.Usage());
  stats.memory_bytes = usage.memory_bytes;
  stats.memory_peak_bytes = usage.memory_peak_bytes;
  stats.memory_kills = usage.memory_kills;
  stats.cpu_time = usage.cpu_time;
  stats.processes = usage.processes;
  ASSIGN_OR_RETURN(stats.disk_bytes, backend_->DiskBytes(directory_), "{}", Name());
  stats.uptime = Age(record_).value_or(std::chrono::milliseconds(0));
  if (state == SandboxState::kRunning) {  // a paused one does not answer
    ASSIGN_OR_RETURN(agent::InfoMessage info, AgentInfo(directory_), "{}", Name());
    stats.running_execs = info.running;
    stats.sessions = std::move(info.sessions);
  }
  return stats;
}

absl::Status AgentSandbox::Stop() {
  absl::StatusOr<UniqueFd> lock = LockDirectory(directory_, /*wait=*/true);
  if (absl::IsNotFound(lock.status())) return absl::OkStatus();
  RETURN_IF_ERROR(lock.status(), "stop {}", Name());
  return Annotate(RemoveSandbox(options_, directory_), fmt::format("stop {}", Name()));
}

}  // namespace

std::unique_ptr<Sandbox> MakeAgentSandbox(LauncherOptions options, const Backend* backend,
                                          Record record) {
  return std::make_unique<AgentSandbox>(std::move(options), backend, std::move(record));
}

}  // namespace lamina::backends
