// SPDX-License-Identifier: Apache-2.0
#include "backends/fncall/pool.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>

#include "backends/agent/frame.h"

namespace lamina::fncall {
namespace {

using agent::EndedMessage;
using agent::Ending;

// A judge's view of it.
EndedMessage ToEnded(const Report& report, uint64_t cpu_limit_ms) {
  EndedMessage ended{
      .wall_us = report.wall_us, .cpu_us = report.cpu_us, .peak_bytes = report.peak_bytes};
  if (report.start.error != 0) {
    SetCannotStart(report.start, ended);
    return ended;
  }
  const bool signalled = WIFSIGNALED(report.wait_status);
  ended.code = signalled ? WTERMSIG(report.wait_status) : WEXITSTATUS(report.wait_status);
  ended.ending = signalled ? Ending::kSignalled : Ending::kExited;
  if (signalled && ended.code == SIGSYS) {
    ended.ending = Ending::kForbiddenCall;
  } else if (report.memory_kills > 0) {
    // Also if the program survived what was killed: it had not what it asked for.
    ended.ending = Ending::kMemoryLimit;
    ended.detail = fmt::format("{} processes were killed for want of memory", report.memory_kills);
  } else if ((signalled && ended.code == SIGXCPU) ||
             (cpu_limit_ms > 0 && report.cpu_us > cpu_limit_ms * 1000)) {
    ended.ending = Ending::kTimeLimit;
  } else if (signalled && ended.code == SIGXFSZ) {
    ended.ending = Ending::kOutputLimit;
  }
  if (ended.ending != Ending::kExited && !signalled) ended.code = SIGKILL;
  return ended;
}

class CallRun : public agent::Run {
 public:
  CallRun(Pool& pool, size_t slot, int socket, UniqueFd result, uint64_t cpu_limit_ms)
      : pool_(pool),
        slot_(slot),
        socket_(socket),
        result_(std::move(result)),
        cpu_limit_ms_(cpu_limit_ms) {}
  ~CallRun() override {
    if (returned_) return;
    Kill();
    std::ignore = TakeReport();
  }

  int64_t pid() const override { return 0; }
  int ended() const override { return socket_; }
  void Signal(int signal) override {
    SendOrder(socket_, Order::kSignal, static_cast<uint8_t>(signal)).IgnoreError();
  }
  void Kill() override { SendOrder(socket_, Order::kKill).IgnoreError(); }

  absl::StatusOr<EndedMessage> Result() override {
    const absl::StatusOr<Report> report = TakeReport();
    if (!report.ok() && memory_limit_) {
      return EndedMessage{.ending = Ending::kMemoryLimit,
                          .code = SIGKILL,
                          .detail = "the call's slot was killed for want of memory"};
    }
    if (!report.ok()) return absl::InternalError("the call's slot has ended");
    if (report->failed_errno != 0) return ErrnoStatus(report->failed_errno, "the call's jail");
    EndedMessage ended = ToEnded(*report, cpu_limit_ms_);
    ASSIGN_OR_RETURN(const uint64_t size, FileSize(result_.get()));
    if (size > 0) {
      if (size > agent::kMaxFrame) return absl::InternalError("files of a call are too large");
      std::string bytes(size, '\0');
      RETURN_IF_ERROR(ReadFull(result_.get(), 0, std::as_writable_bytes(std::span(bytes))));
      ASSIGN_OR_RETURN(EndedMessage files, agent::DecodeEnded(bytes));
      ended.files_out = std::move(files.files_out);
    }
    return ended;
  }

 private:
  // Gives the slot back with it.
  absl::StatusOr<Report> TakeReport() {
    absl::StatusOr<Report> report = ReceiveReport(socket_);
    returned_ = true;
    if (report.ok()) {
      pool_.Return(slot_, report->memory_kills);
    } else {
      memory_limit_ = pool_.ReturnEnded(slot_);
    }
    return report;
  }

  Pool& pool_;
  const size_t slot_;
  const int socket_;  // of the slot
  const UniqueFd result_;
  const uint64_t cpu_limit_ms_;
  bool returned_ = false;
  bool memory_limit_ = false;  // why the slot has ended
};

}  // namespace

Pool::Pool(SlotStarter starter, std::vector<backends::Cgroup> groups)
    : starter_(std::move(starter)) {
  for (backends::Cgroup& group : groups) places_.push_back({.group = std::move(group)});
}

absl::StatusOr<std::unique_ptr<Pool>> Pool::Start(SlotStarter starter,
                                                  std::vector<backends::Cgroup> groups) {
  std::unique_ptr<Pool> pool(new Pool(std::move(starter), std::move(groups)));
  for (size_t slot = 0; slot < pool->places_.size(); ++slot) {
    ASSIGN_OR_RETURN(pool->places_[slot].socket,
                     pool->starter_.StartSlot(static_cast<uint32_t>(slot)));
    pool->free_.push_back(slot);
  }
  return pool;
}

absl::StatusOr<size_t> Pool::Take() {
  std::unique_lock lock(mutex_);
  returned_.wait(lock, [this] { return !free_.empty() || lost_ == places_.size(); });
  if (free_.empty()) return absl::InternalError("all slots have ended");
  const size_t slot = free_.front();
  free_.pop_front();
  return slot;
}

absl::StatusOr<std::unique_ptr<agent::Run>> Pool::Start(const agent::ExecMessage& message,
                                                        agent::Streams streams) {
  UniqueFd request(::memfd_create("request", MFD_CLOEXEC));
  UniqueFd result(::memfd_create("result", MFD_CLOEXEC));
  if (!request.valid() || !result.valid()) return ErrnoStatus(errno, "memfd_create");
  RETURN_IF_ERROR(WriteFull(request.get(), 0, AsBytes(agent::Encode(message))));
  UniqueFd result_there(::fcntl(result.get(), F_DUPFD_CLOEXEC, 0));
  if (!result_there.valid()) return ErrnoStatus(errno, "dup");

  const CallDescriptors descriptors{.in = std::move(streams.in),
                                    .out = std::move(streams.out),
                                    .err = std::move(streams.err),
                                    .request = std::move(request),
                                    .result = std::move(result_there)};
  // A slot may have ended while it was idle; its successor has not.
  for (int turn = 0; turn < 2; ++turn) {
    ASSIGN_OR_RETURN(const size_t slot, Take());
    const int socket = places_[slot].socket.get();
    // After the call before, it makes its next jail; the time of this one begins then.
    if (ReceiveReport(socket).ok() && SendCall(socket, descriptors).ok()) {
      return std::make_unique<CallRun>(*this, slot, socket, std::move(result), message.cpu_ms);
    }
    ReturnEnded(slot);
  }
  return absl::InternalError("slots for calls end as soon as they are there");
}

void Pool::Return(size_t slot, uint64_t memory_kills) {
  const std::lock_guard lock(mutex_);
  places_[slot].memory_kills += memory_kills;
  free_.push_back(slot);
  returned_.notify_one();
}

bool Pool::ReturnEnded(size_t slot) {
  Place& place = places_[slot];
  const uint64_t kills = place.group.MemoryKills();
  const bool memory_limit = kills > place.memory_kills;
  place.memory_kills = kills;
  absl::StatusOr<UniqueFd> socket = absl::InternalError("not started");
  {
    const std::lock_guard lock(starts_);
    socket = starter_.StartSlot(static_cast<uint32_t>(slot));
  }
  const std::lock_guard lock(mutex_);
  if (socket.ok()) {
    place.socket = *std::move(socket);
    free_.push_back(slot);
  } else {
    ++lost_;
  }
  returned_.notify_all();
  return memory_limit;
}

}  // namespace lamina::fncall
