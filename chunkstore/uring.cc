// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/uring.h"

#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

namespace lamina::chunkstore {
namespace {

constexpr unsigned kEntries = 64;     // reads of one call in flight at once
constexpr size_t kIdleRings = 8;      // kept for the next calls; a ring is about 8 KiB
constexpr size_t kMaxRead = 1 << 30;  // the kernel reads less than 2 GiB at a time

// What each errno of io_uring_setup(2) means to an administrator.
std::string_view SetupHint(int error) {
  switch (error) {
    case ENOSYS:
      return " (the kernel has no io_uring)";
    case EPERM:
    case EACCES:
      return " (refused by seccomp or by the sysctl kernel.io_uring_disabled)";
    case ENOMEM:
      return " (the limit on locked memory is too low)";
    default:
      return "";
  }
}

}  // namespace

// One io_uring, used by one thread at a time.
class Ring {
 public:
  static absl::StatusOr<std::unique_ptr<Ring>> Create();
  ~Ring() { ::io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  absl::Status Read(int fd, std::span<const RangeRead> ranges);

 private:
  // Takes over a ring that was set up.
  explicit Ring(const io_uring& ring) : ring_(ring) {}
  void Queue(int fd, const RangeRead& rest, size_t index);
  void SubmitAndWait();

  io_uring ring_;
  unsigned in_flight_ = 0;
};

absl::StatusOr<std::unique_ptr<Ring>> Ring::Create() {
  io_uring ring{};
  // COOP_TASKRUN (Linux 5.19) spares interrupts to a thread that waits anyway.
  int result = ::io_uring_queue_init(kEntries, &ring, IORING_SETUP_COOP_TASKRUN);
  if (result == -EINVAL) result = ::io_uring_queue_init(kEntries, &ring, 0);
  if (result != 0) {
    return ErrnoStatus(-result, fmt::format("io_uring_setup{}", SetupHint(-result)));
  }
  return std::unique_ptr<Ring>(new Ring(ring));
}

void Ring::Queue(int fd, const RangeRead& rest, size_t index) {
  io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);  // never null: at most kEntries are in flight
  const auto length = static_cast<unsigned>(std::min(rest.into.size(), kMaxRead));
  ::io_uring_prep_read(entry, fd, rest.into.data(), length, rest.offset);
  ::io_uring_sqe_set_data64(entry, index);
  ++in_flight_;
}

void Ring::SubmitAndWait() {
  while (true) {
    const int result = ::io_uring_submit_and_wait(&ring_, 1);
    // EAGAIN and EBUSY: the kernel lacks memory or wants completions reaped first.
    if (result >= 0 || result == -EAGAIN || result == -EBUSY) return;
    // Other errors (io_uring_enter(2)) mean a misused ring. Going on would let reads that are in
    // flight write to memory that the caller gets back.
    if (result != -EINTR) std::abort();
  }
}

absl::Status Ring::Read(int fd, std::span<const RangeRead> ranges) {
  std::vector<RangeRead> rest(ranges.begin(), ranges.end());  // what is still missing of each
  size_t next = 0;
  absl::Status status;
  while (true) {
    for (; status.ok() && next < rest.size() && in_flight_ < kEntries; ++next) {
      if (!rest[next].into.empty()) Queue(fd, rest[next], next);
    }
    // After an error the reads in flight are still waited for: they write to the caller's memory.
    if (in_flight_ == 0) return status;
    SubmitAndWait();
    io_uring_cqe* completion = nullptr;
    while (::io_uring_peek_cqe(&ring_, &completion) == 0) {
      const size_t index = ::io_uring_cqe_get_data64(completion);
      const int result = completion->res;
      ::io_uring_cqe_seen(&ring_, completion);
      --in_flight_;
      RangeRead& read = rest[index];
      if (result > 0) {
        read.offset += static_cast<uint64_t>(result);
        read.into = read.into.subspan(static_cast<size_t>(result));
      } else if (result == 0) {
        status.Update(absl::DataLossError(
            fmt::format("end of file at {}, {} bytes missing", read.offset, read.into.size())));
      } else if (result != -EINTR && result != -EAGAIN) {
        status.Update(ErrnoStatus(
            -result, fmt::format("read {} bytes at {}", read.into.size(), read.offset)));
      }
      if (status.ok() && !read.into.empty()) Queue(fd, read, index);
    }
  }
}

RingPool::RingPool() = default;
RingPool::~RingPool() = default;

absl::StatusOr<std::unique_ptr<RingPool>> RingPool::Create() {
  std::unique_ptr<RingPool> pool(new RingPool);
  ASSIGN_OR_RETURN(std::unique_ptr<Ring> ring, Ring::Create());
  pool->GiveBack(std::move(ring));
  return pool;
}

absl::StatusOr<std::unique_ptr<Ring>> RingPool::Borrow() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<Ring> ring = std::move(idle_.back());
      idle_.pop_back();
      return ring;
    }
  }
  return Ring::Create();
}

void RingPool::GiveBack(std::unique_ptr<Ring> ring) {
  std::lock_guard lock(mutex_);
  if (idle_.size() < kIdleRings) idle_.push_back(std::move(ring));
}

absl::Status RingPool::Read(int fd, std::span<const RangeRead> ranges) {
  absl::StatusOr<std::unique_ptr<Ring>> ring = Borrow();
  if (!ring.ok()) return absl::ResourceExhaustedError(std::string(ring.status().message()));
  absl::Status status = (*ring)->Read(fd, ranges);
  GiveBack(std::move(*ring));
  return status;
}

}  // namespace lamina::chunkstore
