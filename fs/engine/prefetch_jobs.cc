// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/prefetch_jobs.h"

#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "fs/engine/attach.h"
#include "fs/engine/metadata_cache.h"
#include "fs/image/image.h"
#include "fs/prefetch/image_prefetch.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::ReadStats;
using Clock = std::chrono::steady_clock;

// Callers ask several times a second.
constexpr std::chrono::seconds kPatience(30);
constexpr int kAttempts = 3;

// Of what is to be fetched.
uint64_t MissingBytes(const Prefetcher::Work& work) {
  uint64_t bytes = 0;
  const auto add = [&bytes](const Blob& blob, uint32_t first, uint32_t end) {
    for (uint32_t i = first; i < end; ++i) {
      if (!blob.Present(i)) bytes += blob.frames()[i].length;
    }
  };
  if (work.rest != Prefetcher::Work::Rest::kLeave) {
    for (const std::shared_ptr<Blob>& blob : work.blobs) add(*blob, 0, blob->frames().size());
  } else {
    for (const FrameSpan& span : work.plan) add(*work.blobs[span.blob], span.first, span.end);
  }
  return bytes;
}

// Room is left to count on from there.
uint64_t RandomId() {
  std::random_device random;
  return std::uniform_int_distribution<uint64_t>(1, uint64_t{1} << 62)(random);
}

}  // namespace

// Guarded by the mutex of PrefetchJobs but for `request` and `stats`.
struct PrefetchJobs::Job {
  PrefetchRequest request;
  std::shared_ptr<ReadStats> stats = std::make_shared<ReadStats>();
  PrefetchReport report;  // counters are added when it is asked for
  Clock::time_point started = Clock::now();
  Clock::time_point asked = Clock::now();
  std::jthread thread;  // last: ends before the rest goes
};

PrefetchJobs::PrefetchJobs(std::string metadata, chunkstore::BlobStore& store, ImageCache& images,
                           Prefetcher& prefetcher, Access access)
    : metadata_(std::move(metadata)),
      store_(store),
      images_(images),
      prefetcher_(prefetcher),
      access_(std::move(access)),
      next_id_(RandomId()) {}

PrefetchJobs::~PrefetchJobs() {
  std::map<uint64_t, std::unique_ptr<Job>> jobs;
  {
    std::lock_guard lock(mutex_);
    jobs = std::exchange(jobs_, {});
  }
  for (const auto& [id, job] : jobs) job->thread.request_stop();
}

uint64_t PrefetchJobs::Start(const PrefetchRequest& request) {
  std::map<uint64_t, std::unique_ptr<Job>> abandoned;  // joined outside the lock
  std::lock_guard lock(mutex_);
  abandoned = TakeAbandoned();
  const uint64_t id = next_id_++;
  Job& job = *jobs_.emplace(id, std::make_unique<Job>()).first->second;
  job.request = request;
  job.report.image = request.image;
  try {
    job.thread = std::jthread([this, &job](const std::stop_token& stop) { Run(job, stop); });
  } catch (...) {  // no thread: it would never finish
    jobs_.erase(id);
    throw;
  }
  return id;
}

absl::StatusOr<PrefetchReport> PrefetchJobs::Report(uint64_t id) {
  std::unique_ptr<Job> ended;
  std::lock_guard lock(mutex_);
  const auto job = jobs_.find(id);
  if (job == jobs_.end()) return absl::NotFoundError(fmt::format("no prefetch {}", id));
  job->second->asked = Clock::now();
  PrefetchReport report = job->second->report;
  const ReadStats& stats = *job->second->stats;
  report.bytes = stats.fetched_bytes;
  report.requests = stats.origin_requests;
  report.frames = stats.fetched_frames + stats.copied_frames;
  if (!report.finished) {
    report.seconds = std::chrono::duration<double>(Clock::now() - job->second->started).count();
  } else {
    ended = std::move(job->second);
    jobs_.erase(job);
  }
  return report;
}

void PrefetchJobs::Cancel(uint64_t id) {
  std::unique_ptr<Job> ended;
  std::lock_guard lock(mutex_);
  const auto job = jobs_.find(id);
  if (job == jobs_.end()) return;
  ended = std::move(job->second);
  ended->thread.request_stop();
  jobs_.erase(job);
}

bool PrefetchJobs::Idle() {
  std::map<uint64_t, std::unique_ptr<Job>> abandoned;
  std::lock_guard lock(mutex_);
  abandoned = TakeAbandoned();
  return jobs_.empty();
}

bool PrefetchJobs::Abandoned(const Job& job) const { return Clock::now() - job.asked > kPatience; }

std::map<uint64_t, std::unique_ptr<PrefetchJobs::Job>> PrefetchJobs::TakeAbandoned() {
  std::map<uint64_t, std::unique_ptr<Job>> abandoned;
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    const auto next = std::next(job);
    if (job->second->report.finished && Abandoned(*job->second)) {
      abandoned.insert(jobs_.extract(job));
    }
    job = next;
  }
  return abandoned;
}

void PrefetchJobs::Run(Job& job, const std::stop_token& stop) {
  absl::Status status = Annotate(Fetch(job, stop), "prefetch " + job.request.image);
  std::lock_guard lock(mutex_);
  job.report.status = std::move(status);
  job.report.seconds = std::chrono::duration<double>(Clock::now() - job.started).count();
  job.report.finished = true;
}

absl::Status PrefetchJobs::Fetch(Job& job, const std::stop_token& stop) {
  ASSIGN_OR_RETURN(const RegistryAccess access, access_(job.request.image, job.request.registry));
  ASSIGN_OR_RETURN(const Image image, OpenImage(job.request.image, oci::Platform::Host(), access));
  {
    std::lock_guard lock(mutex_);
    job.report.manifest_digest = image.manifest_digest.ToString();
  }
  const std::shared_ptr<void> use = images_.Use(RecordOf(image));
  ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Blob>> blobs,
                   AttachAll(store_, std::span(&image, 1)));
  for (const std::shared_ptr<Blob>& blob : blobs) blob->ShareChunks();
  RETURN_IF_ERROR(GetMergedMetadata(metadata_, blobs).status());
  // What the profile names comes first, so that what is there when it is stopped is of use.
  Prefetcher::Work work{.blobs = blobs,
                        .bytes_per_second = job.request.bytes_per_second,
                        .since = store_.Tick(),
                        .stats = job.stats};
  const absl::Status planned = PlanFromProfile(image, work);
  if (job.request.profile_only) {
    RETURN_IF_ERROR(planned);
  } else {
    work.rest = Prefetcher::Work::Rest::kNow;
  }
  {
    std::lock_guard lock(mutex_);
    job.report.bytes_missing = MissingBytes(work);
  }

  // What was evicted meanwhile is fetched again.
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    RETURN_IF_ERROR(FetchOnce(job, work, stop));
    if (MissingBytes(work) == 0) return absl::OkStatus();
  }
  return absl::UnavailableError("parts of it did not come, or did not stay in the cache");
}

absl::Status PrefetchJobs::FetchOnce(const Job& job, Prefetcher::Work work,
                                     const std::stop_token& stop) {
  // Shared with the callback, which may come after a stop.
  struct Result {
    std::mutex mutex;
    std::condition_variable_any changed;
    std::optional<absl::Status> status;
  };
  const auto result = std::make_shared<Result>();
  work.done = [result](absl::Status status) {
    std::lock_guard lock(result->mutex);
    result->status = std::move(status);
    result->changed.notify_all();
  };
  const std::unique_ptr<Prefetcher::Ticket> ticket = prefetcher_.Start(std::move(work));
  while (true) {
    {
      std::unique_lock lock(result->mutex);
      const auto ended = [&] { return result->status.has_value(); };
      if (result->changed.wait_for(lock, stop, std::chrono::seconds(1), ended)) {
        return *result->status;
      }
    }
    if (stop.stop_requested()) return absl::CancelledError("it was stopped");
    std::lock_guard lock(mutex_);
    if (Abandoned(job)) return absl::CancelledError("whoever asked for it is gone");
  }
}

}  // namespace lamina::fs
