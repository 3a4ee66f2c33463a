// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/http/client.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "chunkstore/base/signals.h"
#include "chunkstore/http/curl_library.h"
#include "chunkstore/http/sockets.h"
#include "chunkstore/http/transfer.h"

namespace lamina::http {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxPollMilliseconds = 60'000;

class EventClient : public Client {
 public:
  EventClient(const ClientOptions& options, CURLM* multi)
      : options_(options), multi_(multi), sockets_(options.stall_timeout) {
    const BlockedSignals blocked;
    thread_ = std::thread([this] { Run(); });
    ::pthread_setname_np(thread_.native_handle(), "lamina-http");
  }

  ~EventClient() override {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    Curl().multi_wakeup(multi_);
    thread_.join();
    Curl().multi_cleanup(multi_);
  }

  uint64_t Start(Request request, Done done) override {
    auto transfer = std::make_unique<Transfer>(std::move(request), options_, std::move(done));
    uint64_t id = 0;
    {
      std::lock_guard lock(mutex_);
      id = next_id_++;
      added_.emplace_back(id, std::move(transfer));
    }
    Curl().multi_wakeup(multi_);
    return id;
  }

  void Cancel(uint64_t id) override {
    {
      std::lock_guard lock(mutex_);
      cancelled_.push_back(id);
    }
    Curl().multi_wakeup(multi_);
  }

  void Resume(uint64_t id) override {
    {
      std::lock_guard lock(mutex_);
      resumed_.push_back(id);
    }
    Curl().multi_wakeup(multi_);
  }

  void Stop() override {
    {
      std::lock_guard lock(mutex_);
      refusing_ = true;
    }
    Curl().multi_wakeup(multi_);
  }

 private:
  // A request that is not finished.
  struct Pending {
    std::unique_ptr<Transfer> transfer;
    bool in_flight = false;
  };

  void Run() {
    while (TakeCommands()) {
      StartDue();
      int running = 0;
      Curl().multi_perform(multi_, &running);
      int left = 0;
      while (CURLMsg* message = Curl().multi_info_read(multi_, &left)) {
        if (message->msg == CURLMSG_DONE) EndTry(message->easy_handle, message->data.result);
      }
      Curl().multi_poll(multi_, nullptr, 0, Patience(), nullptr);
    }
    FailAll();
  }

  void FailAll() {
    while (!pending_.empty()) {
      Finish(pending_.begin(), absl::CancelledError("the HTTP client was stopped"));
    }
  }

  // False once the client is to end.
  bool TakeCommands() {
    std::deque<std::pair<uint64_t, std::unique_ptr<Transfer>>> added;
    std::vector<uint64_t> cancelled;
    std::vector<uint64_t> resumed;
    bool stopped = false;
    bool refusing = false;
    {
      std::lock_guard lock(mutex_);
      added.swap(added_);
      cancelled.swap(cancelled_);
      resumed.swap(resumed_);
      stopped = stopped_;
      refusing = refusing_;
    }
    for (auto& [id, transfer] : added) {
      const Clock::time_point not_before = transfer->not_before();
      pending_.emplace(id, Pending{std::move(transfer)});
      if (not_before > Clock::now()) {
        paused_.emplace(not_before, id);
      } else {
        waiting_.push_back(id);
      }
    }
    if (refusing) FailAll();
    for (const uint64_t id : cancelled) {
      const auto found = pending_.find(id);
      if (found != pending_.end()) Finish(found, absl::CancelledError("cancelled"));
    }
    for (const uint64_t id : resumed) {
      const auto found = pending_.find(id);
      // Between two tries there is nothing to go on with.
      if (found == pending_.end() || !found->second.in_flight) continue;
      // Gives out what was kept back, and says here if that was not taken.
      CURL* const handle = found->second.transfer->handle();
      const CURLcode code = Curl().easy_pause(handle, CURLPAUSE_CONT);
      if (code != CURLE_OK) EndTry(handle, code);
    }
    return !stopped;
  }

  void StartDue() {
    const Clock::time_point now = Clock::now();
    while (!paused_.empty() && paused_.begin()->first <= now) {
      // In front of those that never had a turn.
      waiting_.push_front(paused_.begin()->second);
      paused_.erase(paused_.begin());
    }
    while (!waiting_.empty() && in_flight_ < options_.max_in_flight) {
      const auto found = pending_.find(waiting_.front());
      waiting_.pop_front();
      if (found != pending_.end()) Begin(found);
    }
  }

  void Begin(std::map<uint64_t, Pending>::iterator entry) {
    absl::StatusOr<CURL*> handle = entry->second.transfer->Begin();
    if (!handle.ok()) return Finish(entry, handle.status());
    sockets_.Use(*handle);
    const CURLMcode code = Curl().multi_add_handle(multi_, *handle);
    if (code != CURLM_OK) return Finish(entry, absl::InternalError(Curl().multi_strerror(code)));
    entry->second.in_flight = true;
    by_handle_[*handle] = entry->first;
    ++in_flight_;
  }

  void EndTry(CURL* handle, CURLcode code) {
    const auto entry = pending_.find(by_handle_.at(handle));
    if (code == CURLE_OPERATION_TIMEDOUT) {
      sockets_.EndIfSilent(handle, std::chrono::milliseconds(options_.stall_timeout) / 2);
    }
    Detach(entry->second);
    Transfer::Verdict verdict = entry->second.transfer->End(code, jitter_(random_));
    if (verdict.result.has_value()) return Finish(entry, *std::move(verdict.result));
    paused_.emplace(Clock::now() + verdict.pause, entry->first);
  }

  void Detach(Pending& pending) {
    CURL* const handle = pending.transfer->handle();
    Curl().multi_remove_handle(multi_, handle);
    by_handle_.erase(handle);
    pending.in_flight = false;
    --in_flight_;
  }

  void Finish(std::map<uint64_t, Pending>::iterator entry, absl::StatusOr<Response> result) {
    if (entry->second.in_flight) Detach(entry->second);
    const std::unique_ptr<Transfer> transfer = std::move(entry->second.transfer);
    pending_.erase(entry);  // waiting_ and paused_ may still name it
    transfer->Finish(std::move(result));
  }

  int Patience() const {
    if (paused_.empty()) return kMaxPollMilliseconds;
    const auto pause =
        std::chrono::ceil<std::chrono::milliseconds>(paused_.begin()->first - Clock::now());
    return static_cast<int>(std::clamp<int64_t>(pause.count(), 0, kMaxPollMilliseconds));
  }

  const ClientOptions options_;
  CURLM* const multi_;

  std::mutex mutex_;  // guards the next six
  std::deque<std::pair<uint64_t, std::unique_ptr<Transfer>>> added_;
  std::vector<uint64_t> cancelled_;
  std::vector<uint64_t> resumed_;
  uint64_t next_id_ = 1;
  bool refusing_ = false;  // Stop()
  bool stopped_ = false;

  // The event thread's.
  Sockets sockets_;
  std::map<uint64_t, Pending> pending_;
  std::deque<uint64_t> waiting_;
  std::multimap<Clock::time_point, uint64_t> paused_;
  std::map<CURL*, uint64_t> by_handle_;
  int in_flight_ = 0;
  std::mt19937_64 random_{std::random_device()()};
  std::uniform_real_distribution<double> jitter_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace

absl::StatusOr<std::shared_ptr<Client>> Client::Create(const ClientOptions& options) {
  RETURN_IF_ERROR(LoadCurl());
  CURLM* const multi = Curl().multi_init();
  if (multi == nullptr) return absl::ResourceExhaustedError("no memory for an HTTP client");
  Curl().multi_setopt(multi, CURLMOPT_MAX_HOST_CONNECTIONS, long{options.max_connections_per_host});
  Curl().multi_setopt(multi, CURLMOPT_MAXCONNECTS, long{options.max_connections});
  return std::make_shared<EventClient>(options, multi);
}

absl::StatusOr<Response> Client::Perform(Request request) {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<absl::StatusOr<Response>> result;
  Start(std::move(request), [&](absl::StatusOr<Response> response) {
    const std::lock_guard lock(mutex);
    result = std::move(response);
    changed.notify_one();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&result] { return result.has_value(); });
  return *std::move(result);
}

}  // namespace lamina::http
