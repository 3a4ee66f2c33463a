// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/stream_read.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/registry/errors.h"

namespace lamina::registry {

// From the client's event thread to the reader. Outlives both ends' interest in it.
class StreamRead::Pipe {
 public:
  // By the event thread. False once enough is queued.
  bool Put(std::string_view bytes) {
    std::lock_guard lock(mutex_);
    queued_.append(bytes);
    changed_.notify_one();
    paused_ = queued_.size() >= kMaxQueued;
    return !paused_;
  }
  void End(absl::StatusOr<http::Response> result) {
    std::lock_guard lock(mutex_);
    result_ = std::move(result);
    changed_.notify_one();
  }

  // By the reader: waits for bytes, which replace those in `bytes`, but not for longer than kPatience.
  // False at the end. `resume` says that the event thread is to go on.
  bool Take(std::string* bytes, bool* resume) {
    bytes->clear();
    std::unique_lock lock(mutex_);
    const auto came = [this] { return !queued_.empty() || result_.has_value(); };
    if (!changed_.wait_for(lock, kPatience, came)) return true;
    queued_.swap(*bytes);
    *resume = std::exchange(paused_, false);
    return !bytes->empty();
  }
  absl::StatusOr<http::Response> TakeResult() {
    std::lock_guard lock(mutex_);
    return *std::move(result_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string queued_;
  bool paused_ = false;
  std::optional<absl::StatusOr<http::Response>> result_;
};

absl::Status StreamRead::Run(uint64_t offset, uint64_t length,
                             const chunkstore::OriginObject::Sink& sink) {
  sink_ = &sink;
  next_ = offset;
  end_ = offset + length;
  const std::vector<Source*> sources = repository_.Sources();
  absl::Status status;
  for (Source* source : sources) {
    if (next_ == end_) break;
    status = ReadFrom(*source);
    if (status.ok() || refused_ || source == sources.back()) return status;
    source->PassOver(status);
  }
  return status;
}

absl::Status StreamRead::ReadFrom(Source& source) {
  RegistryClient& client = source.client();
  for (int challenges = 0;; ++challenges) {
    ASSIGN_OR_RETURN(http::Request request,
                     client.RangeRequest(digest_, {next_, end_ - next_, size_}));
    const std::string authorization = request.authorization;
    const uint64_t before = next_;
    ASSIGN_OR_RETURN(const http::Response response, Request(client, std::move(request)));
    if (response.ok()) return absl::OkStatus();
    if (next_ > before) challenges = 0;  // a token that was good for a while
    if (response.status == 401 && challenges < kMaxChallenges) {
      ASSIGN_OR_RETURN(const bool answered, client.Answer(response, authorization));
      if (answered) continue;
    }
    return Annotate(ErrorOf(response), client.name());
  }
}

absl::StatusOr<http::Response> StreamRead::Request(RegistryClient& client, http::Request request) {
  const auto pipe = std::make_shared<Pipe>();
  request.sink = [pipe](std::string_view bytes) { return pipe->Put(bytes); };
  const uint64_t id = repository_.http().Start(
      std::move(request),
      [pipe](absl::StatusOr<http::Response> response) { pipe->End(std::move(response)); });
  if (absl::Status status = Drain(*pipe, id); !status.ok()) {
    refused_ = true;
    repository_.http().Cancel(id);
    return status;
  }
  ASSIGN_OR_RETURN(http::Response response, pipe->TakeResult());
  if (response.ok() && next_ != end_) {
    return absl::InternalError(
        fmt::format("{}: {} bytes are missing", client.name(), end_ - next_));
  }
  return response;
}

absl::Status StreamRead::Drain(Pipe& pipe, uint64_t id) {
  std::string bytes;
  while (true) {
    bool resume = false;
    if (!pipe.Take(&bytes, &resume)) return absl::OkStatus();
    if (resume) repository_.http().Resume(id);
    next_ += bytes.size();
    RETURN_IF_ERROR((*sink_)(AsBytes(bytes)));
  }
}

}  // namespace lamina::registry
