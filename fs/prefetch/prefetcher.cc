// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/prefetcher.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <numeric>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::BlobStore;
using chunkstore::Priority;
using chunkstore::UseTime;
using Clock = std::chrono::steady_clock;

// Requests of one image at the same time, if the store does not run more of all images. Those that do
// not run wait there, and cost nothing.
constexpr int kInFlight = 4;
// Requests are made smaller than kBulkWindow if it takes longer than this to be allowed one.
constexpr std::chrono::milliseconds kRateInterval(250);
constexpr uint64_t kMinRequest = 256 << 10;
// How often it is looked at what readers have done, while they do something.
constexpr std::chrono::milliseconds kWatchInterval(100);
// Readers that fetched this many frames, or this part of the image if that is less, in runs of so many
// on average, are taken to read all of it. Starts of programs read libraries whole, but what they read
// lies apart.
constexpr uint64_t kStreamFrom = 96;
constexpr uint64_t kStreamFraction = 4;
constexpr uint64_t kStreamRun = 16;
// A fill goes on after an error, from the start, after a pause that doubles; and it looks again so
// often whether there is room in a cache that was full.
constexpr std::chrono::seconds kFirstPause(1);
constexpr std::chrono::seconds kLastPause(64);
constexpr std::chrono::seconds kRoomInterval(5);
// What may be streamed before readers have read as much.
constexpr uint64_t kStreamAhead = 32 << 20;

uint64_t ContentBytes(const Blob& blob, uint32_t frame) {
  return uint64_t{blob.frames()[frame].blocks} * chunkstore::kBlockSize;
}

uint64_t MissingContent(const Blob& blob, const FrameSpan& span) {
  uint64_t bytes = 0;
  for (uint32_t i = span.first; i < span.end; ++i) {
    if (!blob.Present(i)) bytes += ContentBytes(blob, i);
  }
  return bytes;
}

// Up to `limit` compressed bytes of missing frames from `*frame` on, moved behind them. What is
// present in between stays out at the ends only: the store leaves it out, and small gaps are not
// worth a request.
std::optional<FrameSpan> NextMissing(const Blob& blob, uint32_t index, uint32_t* frame,
                                     uint32_t end, uint64_t limit) {
  const chunkstore::FrameTable& frames = blob.frames();
  end = std::min(end, frames.size());
  while (*frame < end && blob.Present(*frame)) ++*frame;
  if (*frame >= end) return std::nullopt;
  FrameSpan span{index, *frame, *frame};
  for (uint64_t bytes = 0; *frame < end; ++*frame) {
    bytes += frames[*frame].length;
    if (span.end > span.first && bytes > limit) break;
    if (!blob.Present(*frame)) span.end = *frame + 1;
  }
  *frame = span.end;
  return span;
}

}  // namespace

class Prefetcher::Impl : public std::enable_shared_from_this<Impl> {
 public:
  explicit Impl(BlobStore& store)
      : store_(store), max_in_flight_(std::max(kInFlight, store.bulk_requests())) {}

  void StartThread() {
    thread_ = std::jthread([this](const std::stop_token& stop) { Loop(stop); });
  }
  void Stop();

  using Plan = std::function<void(const std::stop_token&, Work&)>;
  std::unique_ptr<Ticket> Start(Work work, Plan plan);

 private:
  struct Image {
    Work work;  // blobs and done go when the image is dropped or finished
    std::stop_source stop;
    size_t next_pack = 0;  // frame of the pack
    size_t next_span = 0;  // of the plan
    uint32_t next_in_span = 0;
    std::vector<uint32_t> rest;  // blobs to fill, largest first
    size_t next_rest = 0;
    uint32_t next_frame = 0;
    uint64_t asked = 0;                        // bytes of content, but for those that are streamed
    bool is_full = false;                      // that was told
    int packs_in_flight = 0;                   // requests of the pack
    std::chrono::seconds pause = kFirstPause;  // after the next error
    uint64_t streamed = 0;                     // bytes of content asked for because of the readers
    uint64_t read_when_seen = 0;               // bytes that readers had read when streaming began
    bool streaming = false;
    bool complete = false;  // nothing is missing, readers need not be watched
    uint64_t seen = 0;      // what readers had done when it was last looked at
    // They have done nothing since then, and their stats tell when they do.
    std::atomic<bool> quiet{false};
    uint64_t readers_fetched = 0;  // frames, when it was last looked at what they do
    bool dropped = false;
    bool finished = false;
    int in_flight = 0;
    Clock::time_point allowed_at{};  // by the rate limit
    Clock::time_point watched_at{};
    absl::Status status;
  };
  using ImagePtr = std::shared_ptr<Image>;
  // One call of the store.
  using Request = std::function<void()>;
  class TicketImpl;
  struct Planner {
    ImagePtr image;
    std::atomic<bool> done{false};
    std::jthread thread;
  };

  void Begin(const ImagePtr& image, Work work);
  void Loop(const std::stop_token& stop);
  void Drop(const ImagePtr& image);
  void Done(const ImagePtr& image, absl::Status status, bool of_pack);

  // All below: with mutex_ held.
  uint64_t MayAsk(const Image& image) const;
  void TryAgainLater(Image& image, Clock::time_point now);
  void Advance(const ImagePtr& image, Clock::time_point now, std::vector<Request>* requests,
               Clock::time_point* wake);
  std::optional<Request> Next(const ImagePtr& image, Clock::time_point now, uint64_t* bytes,
                              Clock::time_point* wake);
  std::optional<Request> NextPacked(const ImagePtr& image, uint64_t limit, uint64_t* bytes);
  std::optional<FrameSpan> NextPlanned(Image& image, uint64_t limit);
  std::optional<FrameSpan> NextRest(Image& image, uint64_t limit);
  std::optional<FrameSpan> NextStreamed(Image& image, uint64_t limit);
  static void Watch(Image& image);
  void LeaveAloneIfQuiet(const ImagePtr& image);
  Request MakeRequest(const ImagePtr& image, const FrameSpan& span, Priority priority,
                      std::optional<UseTime> since);

  BlobStore& store_;
  const int max_in_flight_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::list<ImagePtr> images_;
  std::list<Planner> planners_;
  bool stopped_ = false;
  std::jthread thread_;
};

class Prefetcher::Impl::TicketImpl : public Ticket {
 public:
  TicketImpl(std::weak_ptr<Impl> prefetcher, ImagePtr image)
      : prefetcher_(std::move(prefetcher)), image_(std::move(image)) {}
  ~TicketImpl() override {
    if (const std::shared_ptr<Impl> prefetcher = prefetcher_.lock()) prefetcher->Drop(image_);
  }

 private:
  const std::weak_ptr<Impl> prefetcher_;
  const ImagePtr image_;
};

std::unique_ptr<Prefetcher::Ticket> Prefetcher::Impl::Start(Work work, Plan plan) {
  if (!work.since.has_value()) work.since = store_.Tick();
  const auto image = std::make_shared<Image>();
  auto ticket = std::make_unique<TicketImpl>(weak_from_this(), image);
  if (!plan) {
    Begin(image, std::move(work));
    return ticket;
  }
  std::lock_guard lock(mutex_);
  if (stopped_) return ticket;
  planners_.remove_if([](const Planner& planner) { return planner.done.load(); });
  Planner& planner = planners_.emplace_back();
  planner.image = image;
  planner.thread = std::jthread(
      [this, &planner, image, plan = std::move(plan), work = std::move(work)]() mutable {
        plan(image->stop.get_token(), work);
        Begin(image, std::exchange(work, {}));
        plan = nullptr;
        planner.done = true;
      });
  return ticket;
}

void Prefetcher::Impl::Begin(const ImagePtr& image, Work work) {
  const std::vector<std::shared_ptr<Blob>>& blobs = work.blobs;
  image->rest.resize(blobs.size());
  std::iota(image->rest.begin(), image->rest.end(), 0U);
  std::ranges::stable_sort(image->rest, std::greater(),
                           [&](uint32_t i) { return blobs[i]->size(); });
  {
    std::lock_guard lock(mutex_);
    if (stopped_ || image->dropped) return;
    image->work = std::move(work);
    images_.push_back(image);
  }
  changed_.notify_all();
}

void Prefetcher::Impl::Drop(const ImagePtr& image) {
  image->stop.request_stop();
  Work work;  // let go of outside the lock
  std::lock_guard lock(mutex_);
  image->dropped = true;
  images_.remove(image);
  work = std::exchange(image->work, {});
}

void Prefetcher::Impl::Stop() {
  std::list<ImagePtr> images;
  std::list<Planner> planners;  // joined when it goes, without the lock
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    images = images_;
    planners.swap(planners_);
    thread_.request_stop();
  }
  changed_.notify_all();
  for (const Planner& planner : planners) images.push_back(planner.image);
  for (const ImagePtr& image : images) Drop(image);
  thread_.join();
}

void Prefetcher::Impl::Done(const ImagePtr& image, absl::Status status, bool of_pack) {
  {
    std::lock_guard lock(mutex_);
    --image->in_flight;
    if (of_pack) --image->packs_in_flight;
    if (status.ok()) image->pause = kFirstPause;
    image->status.Update(status);
  }
  changed_.notify_all();
}

void Prefetcher::Impl::Loop(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    std::vector<Request> requests;
    const Clock::time_point now = Clock::now();
    Clock::time_point wake = Clock::time_point::max();
    for (auto it = images_.begin(); it != images_.end();) {
      const ImagePtr image = *it;
      Advance(image, now, &requests, &wake);
      it = image->finished ? images_.erase(it) : std::next(it);
    }
    if (requests.empty()) {
      if (wake == Clock::time_point::max()) {
        changed_.wait(lock);
      } else {
        changed_.wait_until(lock, wake);
      }
      continue;
    }
    lock.unlock();
    for (const Request& request : requests) request();
    requests.clear();  // they may hold the last handle of a blob
    lock.lock();
  }
}

// Bytes of content, but for those that are streamed. More would push out of the cache what was fetched
// first. Readers need the other half.
uint64_t Prefetcher::Impl::MayAsk(const Image& image) const {
  const uint64_t limit = store_.limit_bytes();
  return image.work.rest == Work::Rest::kNow ? limit : limit / 2;
}

void Prefetcher::Impl::TryAgainLater(Image& image, Clock::time_point now) {
  spdlog::warn("prefetch goes on in {} s: {}", image.pause.count(),
               std::string(image.status.message()));
  image.status = absl::OkStatus();
  image.allowed_at = now + image.pause;
  image.pause = std::min(2 * image.pause, kLastPause);
  image.next_rest = 0;
  image.next_frame = 0;
  image.work.since = store_.Tick();  // or a cache that others have filled since would stay full
  image.asked = 0;
  for (const std::shared_ptr<Blob>& blob : image.work.blobs) image.asked += blob->present_bytes();
}

void Prefetcher::Impl::Advance(const ImagePtr& image, Clock::time_point now,
                               std::vector<Request>* requests, Clock::time_point* wake) {
  Work& work = image->work;
  const bool is_fill = work.rest == Work::Rest::kWhenIdle;
  if (is_fill && !image->status.ok() && image->in_flight == 0) TryAgainLater(*image, now);
  while (image->status.ok() && image->in_flight < max_in_flight_) {
    if (now < image->allowed_at) {
      *wake = std::min(*wake, image->allowed_at);
      return;
    }
    uint64_t bytes = 0;
    std::optional<Request> request = Next(image, now, &bytes, wake);
    if (!request) break;
    ++image->in_flight;
    if (work.bytes_per_second > 0) {
      const double seconds =
          static_cast<double>(bytes) / static_cast<double>(work.bytes_per_second);
      image->allowed_at =
          now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }
    requests->push_back(*std::move(request));
  }
  const bool watching = image->status.ok() && work.readers != nullptr && !image->complete;
  if (image->in_flight > 0 || watching || (is_fill && image->is_full)) return;
  image->finished = true;
  if (work.done) {
    requests->push_back([done = std::move(work.done), status = image->status] { done(status); });
  } else if (!image->status.ok()) {
    spdlog::warn("prefetch ends: {}", std::string(image->status.message()));
  }
  // Handles are let go of without the lock.
  requests->push_back([blobs = std::exchange(work.blobs, {})] {});
}

std::optional<Prefetcher::Impl::Request> Prefetcher::Impl::Next(const ImagePtr& image,
                                                                Clock::time_point now,
                                                                uint64_t* bytes,
                                                                Clock::time_point* wake) {
  const Work& work = image->work;
  uint64_t limit = chunkstore::kBulkWindow;
  if (work.bytes_per_second > 0) {
    const auto rate = static_cast<double>(work.bytes_per_second);
    const double allowed = rate * std::chrono::duration<double>(kRateInterval).count();
    if (allowed < static_cast<double>(limit)) {
      limit = std::max(static_cast<uint64_t>(allowed), kMinRequest);
    }
  }
  if (std::optional<Request> packed = NextPacked(image, limit, bytes)) return packed;
  // What the pack has brought is known when it is through.
  if (image->packs_in_flight > 0) return std::nullopt;

  Priority priority = Priority::kBulk;
  std::optional<UseTime> since = work.since;
  std::optional<FrameSpan> span;
  if (image->asked < MayAsk(*image)) {
    image->is_full = false;
    span = NextPlanned(*image, limit);
    if (!span && work.rest != Work::Rest::kLeave) {
      if (work.rest == Work::Rest::kWhenIdle && !image->streaming) priority = Priority::kIdle;
      span = NextRest(*image, limit);
    }
    if (span) image->asked += MissingContent(*work.blobs[span->blob], *span);
  } else if (work.rest == Work::Rest::kNow) {
    image->status.Update(absl::ResourceExhaustedError(
        fmt::format("the image does not fit the cache of {} bytes", MayAsk(*image))));
    return std::nullopt;
  } else if (work.rest == Work::Rest::kWhenIdle) {
    if (!std::exchange(image->is_full, true)) {
      spdlog::warn("prefetch waits for room: half of the cache is {} bytes", MayAsk(*image));
    }
    *wake = std::min(*wake, now + kRoomInterval);
  }
  if (work.readers != nullptr && !image->complete && !image->quiet) {
    const bool due = now - image->watched_at >= kWatchInterval;
    if (due) {
      image->watched_at = now;
      Watch(*image);
    }
    if (!span && image->streaming) {
      span = NextStreamed(*image, limit);
      since.reset();
    }
    if (due && !span) LeaveAloneIfQuiet(image);
    if (!image->quiet) *wake = std::min(*wake, image->watched_at + kWatchInterval);
  }
  if (!span) return std::nullopt;
  const chunkstore::FrameTable& frames = work.blobs[span->blob]->frames();
  for (uint32_t i = span->first; i < span->end; ++i) *bytes += frames[i].length;
  return MakeRequest(image, *span, priority, since);
}

std::optional<Prefetcher::Impl::Request> Prefetcher::Impl::NextPacked(const ImagePtr& image,
                                                                      uint64_t limit,
                                                                      uint64_t* bytes) {
  const Work& work = image->work;
  std::vector<BlobStore::PackedFrame> frames;
  while (image->next_pack < work.pack.frames.size() && image->asked < MayAsk(*image)) {
    const PackContent::Frame& next = work.pack.frames[image->next_pack];
    const std::shared_ptr<Blob>& blob = work.blobs[next.blob];
    const uint32_t length = blob->frames()[next.frame].length;
    if (!frames.empty() && *bytes + length > limit) break;
    ++image->next_pack;
    if (blob->Present(next.frame)) continue;
    frames.push_back({blob, next.frame, next.offset});
    image->asked += ContentBytes(*blob, next.frame);
    *bytes += length;
  }
  if (frames.empty()) return std::nullopt;
  ++image->packs_in_flight;
  return [this, image, frames = std::move(frames), pack = work.pack.object, since = work.since,
          stats = work.stats] {
    store_.FetchPacked(pack, frames, Priority::kBulk, since, stats, image->stop.get_token(),
                       [self = shared_from_this(), image](absl::Status status) {
                         // The plan brings what a pack lacks.
                         if (!status.ok() && !absl::IsCancelled(status)) {
                           spdlog::warn("prefetch: pack: {}", std::string(status.message()));
                         }
                         self->Done(image, absl::OkStatus(), /*of_pack=*/true);
                       });
  };
}

std::optional<FrameSpan> Prefetcher::Impl::NextPlanned(Image& image, uint64_t limit) {
  const std::vector<FrameSpan>& plan = image.work.plan;
  for (; image.next_span < plan.size(); ++image.next_span, image.next_in_span = 0) {
    const FrameSpan& span = plan[image.next_span];
    uint32_t frame = std::max(image.next_in_span, span.first);
    const std::optional<FrameSpan> next =
        NextMissing(*image.work.blobs[span.blob], span.blob, &frame, span.end, limit);
    image.next_in_span = frame;
    if (next) return next;
  }
  return std::nullopt;
}

std::optional<FrameSpan> Prefetcher::Impl::NextRest(Image& image, uint64_t limit) {
  for (; image.next_rest < image.rest.size(); ++image.next_rest, image.next_frame = 0) {
    const uint32_t index = image.rest[image.next_rest];
    const Blob& blob = *image.work.blobs[index];
    const auto next = NextMissing(blob, index, &image.next_frame, blob.frames().size(), limit);
    if (next) return next;
  }
  return std::nullopt;
}

// As with readahead: a reader that stops has cost no more than it used. And no further ahead than the
// cache can keep.
std::optional<FrameSpan> Prefetcher::Impl::NextStreamed(Image& image, uint64_t limit) {
  const uint64_t read = image.work.readers->read_bytes.load();
  const uint64_t since_seen = read - image.read_when_seen;
  if (image.streamed > read + kStreamAhead || image.streamed > since_seen + MayAsk(image) / 4) {
    return std::nullopt;
  }
  const std::optional<FrameSpan> span = NextRest(image, limit);
  if (span) image.streamed += MissingContent(*image.work.blobs[span->blob], *span);
  return span;
}

// Nothing to do until readers go on.
void Prefetcher::Impl::LeaveAloneIfQuiet(const ImagePtr& image) {
  chunkstore::ReadStats& readers = *image->work.readers;
  const auto done = [&readers] { return readers.read_requests + readers.fetched_frames; };
  if (const uint64_t now = done(); now != image->seen) {
    image->seen = now;
    return;
  }
  image->quiet = true;
  readers.activity.Arm([prefetcher = weak_from_this(), watched = std::weak_ptr(image)] {
    if (const ImagePtr image = watched.lock()) image->quiet = false;
    if (const std::shared_ptr<Impl> self = prefetcher.lock()) {
      const std::lock_guard lock(self->mutex_);  // or it could be about to wait
      self->changed_.notify_all();
    }
  });
  if (done() != image->seen) image->quiet = false;
}

// Decides whether to stream the image.
void Prefetcher::Impl::Watch(Image& image) {
  uint64_t frames = 0;
  uint64_t present = 0;
  for (const std::shared_ptr<Blob>& blob : image.work.blobs) {
    frames += blob->frames().size();
    present += blob->present_frames();
  }
  image.complete = present == frames;
  if (image.streaming) return;
  const uint64_t fetched = image.work.readers->fetched_frames.load();
  if (fetched == std::exchange(image.readers_fetched, fetched)) return;
  if (fetched < std::min(kStreamFrom, frames / kStreamFraction)) return;
  uint64_t runs = 0;  // of frames that are there
  for (const std::shared_ptr<Blob>& blob : image.work.blobs) {
    for (uint32_t i = 0; i < blob->frames().size(); ++i) {
      runs += blob->Present(i) && (i == 0 || !blob->Present(i - 1)) ? 1 : 0;
    }
  }
  image.streaming = present >= runs * kStreamRun;
  image.read_when_seen = image.work.readers->read_bytes.load();
}

Prefetcher::Impl::Request Prefetcher::Impl::MakeRequest(const ImagePtr& image,
                                                        const FrameSpan& span, Priority priority,
                                                        std::optional<UseTime> since) {
  return [this, image, span, priority, since, blob = image->work.blobs[span.blob],
          stats = image->work.stats] {
    blob->FetchBulk(span.first, span.end, priority, since, stats, image->stop.get_token(),
                    [self = shared_from_this(), image](absl::Status status) {
                      self->Done(image, std::move(status), /*of_pack=*/false);
                    });
  };
}

Prefetcher::Prefetcher(BlobStore& store) : impl_(std::make_shared<Impl>(store)) {
  impl_->StartThread();
}

Prefetcher::~Prefetcher() { impl_->Stop(); }

std::unique_ptr<Prefetcher::Ticket> Prefetcher::Start(Work work) {
  return impl_->Start(std::move(work), nullptr);
}

std::unique_ptr<Prefetcher::Ticket> Prefetcher::Start(
    Work work, std::function<void(const std::stop_token&, Work&)> plan) {
  return impl_->Start(std::move(work), std::move(plan));
}

}  // namespace lamina::fs
