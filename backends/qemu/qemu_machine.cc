// SPDX-License-Identifier: Apache-2.0
#include "backends/qemu/qemu_machine.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "backends/agent/mux.h"
#include "backends/qemu/qmp.h"

namespace lamina::backends {
namespace {

using agent::Mux;
using nlohmann::json;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kQmpPatience{60};
constexpr seconds kQuietPatience{10};
constexpr seconds kMigrationPatience{600};
constexpr useconds_t kPoll = 5000;

struct SocketPair {
  UniqueFd ours;
  UniqueFd qemus;
};

absl::StatusOr<SocketPair> MakeSocketPair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return ErrnoStatus(errno, "socketpair");
  }
  return SocketPair{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

class QemuMachine : public Machine {
 public:
  QemuMachine(ChildProcess process, UniqueFd qmp)
      : process_(std::move(process)), qmp_(std::move(qmp)) {}
  ~QemuMachine() override {
    process_ = ChildProcess();
    if (mux_ != nullptr) mux_->Stop();
    if (mux_thread_.joinable()) mux_thread_.join();
  }

  absl::Status Begin(UniqueFd agent, const std::string& snapshot);

  absl::Status AwaitAgent(std::chrono::milliseconds patience) override;
  int ended() const override { return process_.ended(); }
  void Connect(UniqueFd connection) override { mux_->Open(std::move(connection)); }
  absl::Status Pause() override;
  absl::Status Resume() override;
  absl::Status SaveMemory(const std::string& directory) override;

 private:
  absl::Status PrepareMigration();
  absl::Status AwaitMigration();
  absl::Status Load(const std::string& snapshot);

  ChildProcess process_;
  Qmp qmp_;
  std::unique_ptr<Mux> mux_;
  std::thread mux_thread_;
  bool quiet_ = false;  // the agent's stream, since the machine was paused

  std::mutex mutex_;
  std::condition_variable changed_;
  bool greeted_ = false;
  absl::Status stream_ended_;  // why, once it has
};

absl::Status QemuMachine::Begin(UniqueFd agent, const std::string& snapshot) {
  ASSIGN_OR_RETURN(mux_, Mux::Create(Mux::Side::kHost, std::move(agent), {.greeted = [this] {
                                       const std::lock_guard lock(mutex_);
                                       greeted_ = true;
                                       changed_.notify_all();
                                     }}));
  RETURN_IF_ERROR(qmp_.Negotiate(kQmpPatience));
  if (!snapshot.empty()) RETURN_IF_ERROR(Load(snapshot), "load {}", snapshot);
  mux_thread_ = std::thread([this] {
    const absl::Status ended = mux_->Run();
    {
      const std::lock_guard lock(mutex_);
      stream_ended_ = ended.ok() ? absl::CancelledError("stopped") : ended;
      changed_.notify_all();
    }
    // A guest that breaks the protocol is not served any more, and would hold its callers up.
    if (absl::IsDataLoss(ended)) qmp_.Execute("quit").IgnoreError();
  });
  return absl::OkStatus();
}

absl::Status QemuMachine::AwaitAgent(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [this] { return greeted_ || !stream_ended_.ok(); });
  if (greeted_) return absl::OkStatus();
  if (absl::IsDataLoss(stream_ended_)) return stream_ended_;
  if (!stream_ended_.ok())
    return absl::InternalError("the machine ended before its agent was there");
  return absl::DeadlineExceededError(
      fmt::format("the agent is not there after {} s",
                  std::chrono::duration_cast<std::chrono::seconds>(patience).count()));
}

absl::Status QemuMachine::Pause() {
  quiet_ = mux_->Quiesce(kQuietPatience).ok();
  absl::Status stopped = qmp_.Execute("stop").status();
  if (!stopped.ok()) {
    // It may stop all the same, once it gets to it.
    qmp_.Execute("cont").IgnoreError();
    mux_->Continue();
    quiet_ = false;
  }
  return stopped;
}

absl::Status QemuMachine::Resume() {
  RETURN_IF_ERROR(qmp_.Execute("cont").status());
  mux_->Continue();
  quiet_ = false;
  return absl::OkStatus();
}

// Memory that is shared with others is that of the devices, which the next machine has as well.
absl::Status QemuMachine::PrepareMigration() {
  RETURN_IF_ERROR(
      qmp_.Execute("migrate-set-capabilities",
                   {{"capabilities", {{{"capability", "x-ignore-shared"}, {"state", true}}}}})
          .status());
  constexpr uint64_t kUnbounded = uint64_t{1} << 40;
  return qmp_.Execute("migrate-set-parameters", {{"max-bandwidth", kUnbounded}}).status();
}

absl::Status QemuMachine::AwaitMigration() {
  const auto deadline = steady_clock::now() + kMigrationPatience;
  while (steady_clock::now() < deadline) {
    ASSIGN_OR_RETURN(const json state, qmp_.Execute("query-migrate"));
    const std::string status = state.is_object() ? state.value("status", "") : "";
    if (status == "completed") return absl::OkStatus();
    if (status == "failed" || status == "cancelled") {
      return absl::InternalError(
          fmt::format("QEMU: copying the memory {}: {}", status, state.value("error-desc", "")));
    }
    ::usleep(kPoll);
  }
  return absl::DeadlineExceededError("QEMU: copying the memory takes too long");
}

absl::Status QemuMachine::SaveMemory(const std::string& directory) {
  if (!quiet_) {
    return absl::FailedPreconditionError(
        "the machine was paused while its agent was busy: resume it, and try again");
  }
  RETURN_IF_ERROR(PrepareMigration());
  ASSIGN_OR_RETURN(const UniqueFd file,
                   OpenFile(directory + "/" + kSnapshotMemory, O_RDWR | O_CREAT | O_EXCL, 0600));
  RETURN_IF_ERROR(qmp_.Execute("getfd", {{"fdname", "snapshot"}}, file.get()).status());
  RETURN_IF_ERROR(qmp_.Execute("migrate", {{"uri", "fd:snapshot"}}).status());
  absl::Status done = AwaitMigration();
  if (!done.ok()) qmp_.Execute("migrate_cancel").IgnoreError();
  return done;
}

absl::Status QemuMachine::Load(const std::string& snapshot) {
  RETURN_IF_ERROR(PrepareMigration());
  ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(snapshot + "/" + kSnapshotMemory, O_RDONLY));
  RETURN_IF_ERROR(qmp_.Execute("getfd", {{"fdname", "snapshot"}}, file.get()).status());
  RETURN_IF_ERROR(qmp_.Execute("migrate-incoming", {{"uri", "fd:snapshot"}}).status());
  RETURN_IF_ERROR(AwaitMigration());
  // It was paused when it was saved, and is so still.
  return qmp_.Execute("cont").status();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Machine>> StartQemuMachine(const std::vector<std::string>& arguments,
                                                          const std::string& snapshot, int output) {
  ASSIGN_OR_RETURN(SocketPair agent, MakeSocketPair());
  ASSIGN_OR_RETURN(SocketPair qmp, MakeSocketPair());
  static_assert(kQemuAgentDescriptor == 3 && kQemuQmpDescriptor == 4);
  ASSIGN_OR_RETURN(ChildProcess process,
                   ChildProcess::Start(arguments, {agent.qemus.get(), qmp.qemus.get()}, output));
  agent.qemus.Reset();
  qmp.qemus.Reset();
  auto machine = std::make_unique<QemuMachine>(std::move(process), std::move(qmp.ours));
  RETURN_IF_ERROR(machine->Begin(std::move(agent.ours), snapshot));
  return machine;
}

}  // namespace lamina::backends
