// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/fuse_session.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>

#include "fs/mount/mountinfo.h"

namespace lamina::fs {
namespace {

// Requests wait for fetches outside these threads, so a thread is busy only while it copies from
// the page cache or waits for the local disk.
unsigned ThreadCount() { return std::clamp(std::thread::hardware_concurrency() * 2, 4u, 16u); }

// The kernel's default of 12 requests in the background would leave the origin idle: asynchronous
// direct I/O, which EROFS readahead is here, counts as background (fuse_simple_background).
constexpr unsigned kMaxBackground = 128;

// For the life of the object no signal is delivered to this thread or to threads that it starts:
// signals are the program's business.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

// An epoll descriptor that waits for both. A request wakes one of the threads only
// (EPOLLEXCLUSIVE), an end of the session all of them.
absl::StatusOr<UniqueFd> WatchForEvents(int device, int stop) {
  UniqueFd events(::epoll_create1(EPOLL_CLOEXEC));
  if (!events.valid()) return ErrnoStatus(errno, "epoll_create1");
  epoll_event request{.events = EPOLLIN | EPOLLEXCLUSIVE, .data = {}};
  epoll_event end{.events = EPOLLIN, .data = {}};
  if (::epoll_ctl(events.get(), EPOLL_CTL_ADD, device, &request) != 0 ||
      ::epoll_ctl(events.get(), EPOLL_CTL_ADD, stop, &end) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  return events;
}

}  // namespace

absl::StatusOr<std::unique_ptr<FuseSession>> FuseSession::Start(const Options& options,
                                                                const fuse_lowlevel_ops& operations,
                                                                void* owner) {
  std::unique_ptr<FuseSession> self(new FuseSession(options, owner));
  ASSIGN_OR_RETURN(self->mountpoint_, RealPath(options.mount.mountpoint), "mount FUSE");

  fuse_lowlevel_ops complete = operations;
  complete.init = &FuseSession::Init;
  char name[] = "lamina";
  char* arguments[] = {name, nullptr};
  fuse_args args = FUSE_ARGS_INIT(1, arguments);
  self->session_ = ::fuse_session_new(&args, &complete, sizeof(complete), self.get());
  ::fuse_opt_free_args(&args);
  if (self->session_ == nullptr) return absl::ResourceExhaustedError("fuse_session_new failed");

  FuseMountOptions mount = options.mount;
  mount.mountpoint = self->mountpoint_;
  ASSIGN_OR_RETURN(UniqueFd device, MountFuse(mount));
  if (::fcntl(device.get(), F_SETFL, O_RDWR | O_NONBLOCK) != 0) {
    return ErrnoStatus(errno, "make the FUSE device non-blocking");
  }
  // For a path of this form libfuse mounts nothing and takes the descriptor over.
  ::fuse_session_mount(self->session_, fmt::format("/dev/fd/{}", device.Release()).c_str());
  ASSIGN_OR_RETURN(const auto info, FindMountAt(self->mountpoint_));
  if (info) self->device_ = info->device;
  RETURN_IF_ERROR(self->StartThreads(), "mount FUSE at {}", mount.mountpoint);
  return self;
}

FuseSession::FuseSession(const Options& options, void* owner)
    : wanted_(options.capabilities), owner_(owner) {}

FuseSession::~FuseSession() {
  if (session_ == nullptr) return;
  // While requests are still answered, because fusermount3 looks at the directory.
  if (StillMounted()) Unmount(mountpoint_, /*detach=*/true).IgnoreError();
  StopThreads();
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return replies_ == 0; });
  }
  ::fuse_session_destroy(session_);  // closes the device: the kernel aborts what is left
}

void FuseSession::Init(void* self, fuse_conn_info* connection) {
  FuseSession& session = *static_cast<FuseSession*>(self);
  connection->want |= session.wanted_ & connection->capable;
  session.capabilities_ = session.wanted_ & connection->capable;
  // What is served never changes, so cached data need not be dropped when attributes are read anew.
  connection->want &= ~FUSE_CAP_AUTO_INVAL_DATA;
  connection->max_background = kMaxBackground;
  connection->congestion_threshold = kMaxBackground;
  std::lock_guard lock(session.mutex_);
  session.initialized_ = true;
  session.changed_.notify_all();
}

absl::Status FuseSession::StartThreads() {
  // Not libfuse's own loop: nothing makes that end while the file system is in use, which it is
  // when EROFS holds files of it.
  stop_.Reset(::eventfd(0, EFD_CLOEXEC));
  if (!stop_.valid()) return ErrnoStatus(errno, "eventfd");
  for (unsigned i = 0; i < ThreadCount(); ++i) {
    ASSIGN_OR_RETURN(UniqueFd events, WatchForEvents(::fuse_session_fd(session_), stop_.get()));
    events_.push_back(std::move(events));
  }
  {
    const BlockedSignals blocked;
    for (const UniqueFd& events : events_) {
      threads_.emplace_back([this, fd = events.get()] { Serve(fd); });
    }
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return initialized_ || ended_; });
  if (!initialized_) return absl::InternalError("the connection ended before it was set up");
  return absl::OkStatus();
}

void FuseSession::Serve(int events) {
  fuse_buf request{};
  while (!::fuse_session_exited(session_)) {
    epoll_event event;
    if (::epoll_wait(events, &event, 1, -1) < 0) continue;  // EINTR
    const int length = ::fuse_session_receive_buf(session_, &request);
    if (length == -EINTR || length == -EAGAIN) continue;  // another thread was faster
    if (length <= 0) break;
    ::fuse_session_process_buf(session_, &request);
  }
  ::free(request.mem);
  std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void FuseSession::StopThreads() {
  ::fuse_session_exit(session_);
  ::eventfd_write(stop_.get(), 1);
  for (std::thread& thread : threads_) thread.join();
}

bool FuseSession::StillMounted() const {
  // The device number is ours as long as the connection is up: POLLERR says that it is not.
  pollfd connection{::fuse_session_fd(session_), 0, 0};
  if (::poll(&connection, 1, 0) != 0) return false;
  const auto mount = FindMountAt(mountpoint_);
  return mount.ok() && mount->has_value() && (*mount)->device == device_;
}

void FuseSession::ForgetEntry(fuse_ino_t parent, std::string_view name) {
  // ENOENT: the kernel does not know the name.
  ::fuse_lowlevel_notify_inval_entry(session_, parent, name.data(), name.size());
}

void FuseSession::BeginReply() {
  std::lock_guard lock(mutex_);
  ++replies_;
}

void FuseSession::EndReply() {
  std::lock_guard lock(mutex_);
  --replies_;
  if (replies_ == 0) changed_.notify_all();
}

}  // namespace lamina::fs
