// SPDX-License-Identifier: Apache-2.0
#include "backends/fncall/slot.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "backends/cgroup.h"
#include "chunkstore/base/descriptor_message.h"

namespace lamina::fncall {
namespace {

using backends::Cgroup;

// Numbers of the slot's control group, through descriptors: paths end when the slot enters the image.
class Meter {
 public:
  static Meter Open(const Cgroup& group) {
    Meter meter;
    meter.kills_.Reset(::open(group.MemoryEventsFile().c_str(), O_RDONLY | O_CLOEXEC));
    meter.peak_.Reset(::open(group.MemoryPeakFile().c_str(), O_RDWR | O_CLOEXEC));
    meter.usage_.Reset(::open(group.MemoryUsageFile().c_str(), O_RDONLY | O_CLOEXEC));
    return meter;
  }
  uint64_t Kills() const { return Number(kills_.get(), "oom_kill "); }
  uint64_t Usage() const { return Number(usage_.get(), ""); }
  uint64_t Peak() const { return Number(peak_.get(), ""); }
  // Version 2 can since Linux 6.12, for the one descriptor.
  bool ResetPeak() const { return ::pwrite(peak_.get(), "0", 1, 0) == 1; }

 private:
  static uint64_t Number(int file, std::string_view key) {
    std::array<char, 1024> text{};
    const ssize_t got = ::pread(file, text.data(), text.size(), 0);
    if (got <= 0) return 0;
    std::string_view rest(text.data(), static_cast<size_t>(got));
    if (!key.empty()) {
      const size_t place = rest.find(key);
      if (place == std::string_view::npos) return 0;
      rest.remove_prefix(place + key.size());
    }
    uint64_t value = 0;
    std::from_chars(rest.data(), rest.data() + rest.size(), value);
    return value;
  }

  UniqueFd kills_;
  UniqueFd peak_;
  UniqueFd usage_;
};

// What fills memory that is nobody's, like /tmp, is no larger itself than the slot: the call is killed
// for it, whose program takes this back (agent/program.h). Where root may not, the slot may be killed,
// and is replaced.
void ProtectFromOutOfMemory() {
  const UniqueFd score(::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC));
  constexpr std::string_view kNever = "-1000";
  if (score.valid()) std::ignore = ::write(score.get(), kNever.data(), kNever.size());
}

class Slot {
 public:
  Slot(const SlotOptions& options, int socket) : options_(options), socket_(socket) {}

  absl::Status SetUp() {
    ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Create(options_.cgroup, options_.limits));
    // What is left of the slot that was here before.
    RETURN_IF_ERROR(group.KillAll());
    RETURN_IF_ERROR(group.Add(::getpid()));
    ProtectFromOutOfMemory();
    meter_ = Meter::Open(group);
    RETURN_IF_ERROR(EnterImage(options_.jail));
    return Prepare();
  }

  // Until the pool goes.
  void Serve() {
    // Says that the jail is ready: a call's time does not begin before it can run.
    while (SendReport(socket_, Report()).ok()) {
      auto packet = ReceivePacket(socket_);
      // Orders for a call that had ended already.
      while (packet.ok() && packet->first.order != Order::kCall) packet = ReceivePacket(socket_);
      if (!packet.ok()) return;
      const std::optional<Report> report = Run(std::move(packet->second));
      if (!report.has_value() || !SendReport(socket_, *report).ok()) return;
      // What fails here fails the next call, which says why.
      prepared_ = Prepare();
    }
  }

 private:
  absl::Status Prepare() {
    jail_.reset();
    ASSIGN_OR_RETURN(Jail jail, Jail::Prepare(options_.jail));
    jail_.emplace(std::move(jail));
    return absl::OkStatus();
  }

  // Nothing if the pool has gone.
  std::optional<Report> Run(CallDescriptors descriptors) {
    Report report;
    if (!jail_.has_value()) prepared_ = Prepare();
    if (!jail_.has_value()) {
      report.failed_errno = StatusToErrno(prepared_);
      return report;
    }
    const uint64_t kills_before = meter_.Kills();
    const bool peak_known = meter_.ResetPeak();
    const uint64_t usage_before = meter_.Usage();
    if (!SendCall(jail_->socket(), descriptors).ok()) {
      report.failed_errno = EPIPE;
      jail_.reset();
      return report;
    }
    descriptors = CallDescriptors();
    if (!PassOrders()) return std::nullopt;
    const absl::StatusOr<Report> said = ReceiveReport(jail_->socket());
    if (said.ok()) {
      report = *said;
    } else {
      report.wait_status = SIGKILL;
    }
    jail_->WaitForEnd();
    jail_.reset();
    report.memory_kills = meter_.Kills() - kills_before;
    if (peak_known) {
      const uint64_t peak = meter_.Peak();
      report.peak_bytes = std::max(report.peak_bytes, peak - std::min(peak, usage_before));
    }
    return report;
  }

  // Until the jail reports, or ends without.
  bool PassOrders() {
    std::array<pollfd, 2> waits{pollfd{jail_->socket(), POLLIN}, pollfd{socket_, POLLIN}};
    while (true) {
      if (::poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) return false;
      if (waits[0].revents != 0) return true;
      if (waits[1].revents == 0) continue;
      const auto packet = ReceivePacket(socket_);
      if (!packet.ok()) return false;
      SendOrder(jail_->socket(), packet->first.order, packet->first.signal).IgnoreError();
    }
  }

  const SlotOptions& options_;
  const int socket_;
  Meter meter_;
  std::optional<Jail> jail_;
  absl::Status prepared_;
};

// Closes what belongs to the pool and to other slots: each must see the end of the others.
void CloseAllBut(int first, int second) {
  const unsigned low = static_cast<unsigned>(std::min(first, second));
  const unsigned high = static_cast<unsigned>(std::max(first, second));
  const auto close_range = [](unsigned from, unsigned to) {
    if (from <= to) ::syscall(SYS_close_range, from, to, 0);
  };
  close_range(STDERR_FILENO + 1, low - 1);
  close_range(low + 1, high - 1);
  close_range(high + 1, ~0U);
}

[[noreturn]] void SlotMain(const SlotOptions& options, int socket, int error_pipe) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  ::signal(SIGCHLD, SIG_DFL);
  CloseAllBut(socket, error_pipe);
  Slot slot(options, socket);
  const absl::Status ready = slot.SetUp();
  if (!ready.ok()) {
    const std::string text(ready.message());
    std::ignore = ::write(error_pipe, text.data(), text.size());
    ::_exit(1);
  }
  ::close(error_pipe);
  slot.Serve();
  ::_exit(0);
}

absl::StatusOr<UniqueFd> StartSlotHere(const SlotOptions& options) {
  ASSIGN_OR_RETURN(SocketPair pair, MakeSocketPair());
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd error_read(ends[0]);
  UniqueFd error_write(ends[1]);
  const pid_t process = ::fork();
  if (process < 0) return ErrnoStatus(errno, "start a slot");
  if (process == 0) {
    pair.ours.Reset();
    SlotMain(options, pair.theirs.get(), error_write.get());
  }
  error_write.Reset();
  std::array<char, 1024> text{};
  ssize_t got = 0;
  do {
    got = ::read(error_read.get(), text.data(), text.size());
  } while (got < 0 && errno == EINTR);
  if (got > 0) return absl::InternalError(std::string(text.data(), static_cast<size_t>(got)));
  return std::move(pair.ours);
}

constexpr std::string_view kStarted = "started";

// A request is the number of a slot; the answer is kStarted, with the socket, or why not.
[[noreturn]] void StarterMain(const std::vector<SlotOptions>& slots, int socket) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  ::signal(SIGCHLD, SIG_IGN);  // nobody waits for slots
  CloseAllBut(socket, socket);
  while (true) {
    const absl::StatusOr<DescriptorMessage> asked = ReceiveDescriptorMessage(socket);
    uint32_t slot = 0;
    if (!asked.ok() || asked->text.size() != sizeof(slot)) ::_exit(0);  // the pool has gone
    std::memcpy(&slot, asked->text.data(), sizeof(slot));
    if (slot >= slots.size()) ::_exit(1);
    const absl::StatusOr<UniqueFd> started = StartSlotHere(slots[slot]);
    absl::Status sent;
    if (started.ok()) {
      const std::array<int, 1> passed{started->get()};
      sent = SendDescriptorMessage(socket, kStarted, passed);
    } else {
      sent = SendDescriptorMessage(socket, std::string(started.status().message()));
    }
    if (!sent.ok()) ::_exit(0);
  }
}

}  // namespace

absl::StatusOr<SlotStarter> SlotStarter::Start(std::vector<SlotOptions> slots) {
  ASSIGN_OR_RETURN(SocketPair pair, MakeSocketPair());
  const pid_t process = ::fork();
  if (process < 0) return ErrnoStatus(errno, "start the starter of slots");
  if (process == 0) StarterMain(slots, pair.theirs.get());
  return SlotStarter(std::move(pair.ours));
}

absl::StatusOr<UniqueFd> SlotStarter::StartSlot(uint32_t slot) {
  const std::string_view request(reinterpret_cast<const char*>(&slot), sizeof(slot));
  RETURN_IF_ERROR(SendDescriptorMessage(socket_.get(), request), "start slot {}", slot);
  ASSIGN_OR_RETURN(DescriptorMessage answer, ReceiveDescriptorMessage(socket_.get()),
                   "start slot {}", slot);
  if (answer.text == kStarted && answer.fds.size() == 1) return std::move(answer.fds[0]);
  return absl::InternalError(fmt::format("slot {}: {}", slot, answer.text));
}

}  // namespace lamina::fncall
