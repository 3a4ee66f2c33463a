// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/parallel_read.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "chunkstore/registry/errors.h"

namespace lamina::registry {
namespace {

// Requests of one read in flight. More would only keep others waiting.
constexpr size_t kParallel = 8;
// Longer requests are bulk transfers: a second one would cost more than it could gain.
constexpr uint64_t kMaxHedged = 1 << 20;

}  // namespace

ParallelRead::~ParallelRead() {
  for (size_t i = 0; i < pieces_.size(); ++i) CancelAttempts(i);
}

absl::Status ParallelRead::Run(std::vector<PlannedRequest> plan) {
  for (PlannedRequest& request : plan) pieces_.push_back({.request = std::move(request)});
  patience_ = latencies_.Patience();
  while (done_ < pieces_.size()) {
    while (started_ < pieces_.size() && started_ - done_ < kParallel) {
      pieces_[started_].started_at = Clock::now();
      RETURN_IF_ERROR(Launch(started_++));
    }
    std::optional<Event> event = NextEvent();
    RETURN_IF_ERROR(event ? HandleEvent(*std::move(event)) : HedgeLate());
  }
  return absl::OkStatus();
}

absl::Status ParallelRead::Launch(size_t piece) {
  const size_t source = std::min(pieces_[piece].next_source++, sources_.size() - 1);
  return Launch(piece, source, 0);
}

absl::Status ParallelRead::Launch(size_t piece, size_t source, int challenges) {
  const PlannedRequest& planned = pieces_[piece].request;
  const size_t number = attempts_.size();
  attempts_.push_back({.piece = piece, .source = source, .challenges = challenges});
  ++pieces_[piece].running;
  absl::StatusOr<http::Request> request =
      sources_[source]->client().RangeRequest(digest_, {planned.offset, planned.length, size_});
  if (!request.ok()) return HandleFailure(attempts_[number], request.status());
  if (pieces_[piece].running > 1) {
    request->attempts = 1;  // there is the first one
    // Or it would wait for what that one waits for.
    request->fresh_connection = true;
  }
  attempts_[number].authorization = request->authorization;
  attempts_[number].id = repository_.http().Start(
      *std::move(request), [events = events_, number](absl::StatusOr<http::Response> response) {
        const std::lock_guard lock(events->mutex);
        events->queue.push_back({number, std::move(response)});
        events->changed.notify_one();
      });
  return absl::OkStatus();
}

std::optional<ParallelRead::Event> ParallelRead::NextEvent() {
  std::optional<Clock::time_point> late_at;
  for (size_t i = 0; i < started_; ++i) {
    if (!MayHedge(pieces_[i])) continue;
    const Clock::time_point at = pieces_[i].started_at + patience_;
    late_at = late_at ? std::min(*late_at, at) : at;
  }
  std::unique_lock lock(events_->mutex);
  const auto there = [this] { return !events_->queue.empty(); };
  if (!late_at) {
    events_->changed.wait(lock, there);
  } else if (!events_->changed.wait_until(lock, *late_at, there)) {
    return std::nullopt;
  }
  Event event = std::move(events_->queue.front());
  events_->queue.pop_front();
  return event;
}

bool ParallelRead::MayHedge(const Piece& piece) const {
  return !piece.done && !piece.hedged && piece.running == 1 && piece.request.length <= kMaxHedged;
}

absl::Status ParallelRead::HedgeLate() {
  const Clock::time_point now = Clock::now();
  for (size_t i = 0; i < started_; ++i) {
    if (!MayHedge(pieces_[i]) || now < pieces_[i].started_at + patience_) continue;
    pieces_[i].hedged = true;
    // Who has asked for a pause gets nothing more meanwhile.
    const size_t source = std::min(pieces_[i].next_source, sources_.size() - 1);
    if (sources_[source]->client().is_busy()) continue;
    if (latencies_.TakeHedge()) RETURN_IF_ERROR(Launch(i));
  }
  return absl::OkStatus();
}

absl::Status ParallelRead::HandleEvent(Event event) {
  Attempt& attempt = attempts_[event.attempt];
  attempt.id.reset();
  Piece& piece = pieces_[attempt.piece];
  if (piece.done) return absl::OkStatus();
  if (!event.response.ok()) return HandleFailure(attempt, event.response.status());
  if (event.response->ok()) {
    Complete(piece, event.response->body);
    CancelAttempts(attempt.piece);
    return absl::OkStatus();
  }
  RegistryClient& client = sources_[attempt.source]->client();
  if (event.response->status == 401 && attempt.challenges < kMaxChallenges) {
    const absl::StatusOr<bool> answered = client.Answer(*event.response, attempt.authorization);
    if (!answered.ok()) return HandleFailure(attempt, answered.status());
    if (*answered) {
      --piece.running;
      return Launch(attempt.piece, attempt.source, attempt.challenges + 1);
    }
  }
  return HandleFailure(attempt, Annotate(ErrorOf(*event.response), client.name()));
}

absl::Status ParallelRead::HandleFailure(const Attempt& attempt, absl::Status why) {
  Piece& piece = pieces_[attempt.piece];
  --piece.running;
  if (attempt.source + 1 < sources_.size()) sources_[attempt.source]->PassOver(why);
  if (piece.running > 0) return absl::OkStatus();
  if (piece.next_source < sources_.size()) return Launch(attempt.piece);
  return why;
}

void ParallelRead::Complete(Piece& piece, const std::string& body) {
  for (const chunkstore::RangeRead& part : piece.request.parts) {
    std::memcpy(part.into.data(), body.data() + (part.offset - piece.request.offset),
                part.into.size());
  }
  piece.done = true;
  ++done_;
  if (piece.request.length <= kMaxHedged) latencies_.Add(Clock::now() - piece.started_at);
}

void ParallelRead::CancelAttempts(size_t piece) {
  for (Attempt& attempt : attempts_) {
    if (attempt.piece != piece || !attempt.id) continue;
    repository_.http().Cancel(*attempt.id);
    attempt.id.reset();
  }
}

}  // namespace lamina::registry
