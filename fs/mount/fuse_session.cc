// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/fuse_session.h"

#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <absl/strings/escaping.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "chunkstore/base/signals.h"
#include "fs/mount/mountinfo.h"

namespace lamina::fs {
namespace {

// Requests wait for fetches outside these threads, so a thread is busy only while it copies from
// the page cache or waits for the local disk.
unsigned ThreadCount() { return std::clamp(std::thread::hardware_concurrency() * 2, 4u, 16u); }

// After a failure to receive a request that is not the connection's end.
constexpr std::chrono::milliseconds kReceivePause(10);

// The kernel's default of 12 requests in the background would leave the origin idle: asynchronous
// direct I/O, which EROFS readahead is here, counts as background (fuse_simple_background). All images
// share the connection, so it takes more than the readers of one that does not answer. A request that
// waits costs little; the kernel's max_user_bgreq is a limit for who is not root only.
constexpr unsigned kMaxBackground = 8192;

// Has the kernel put requests that were read and not answered back into its queue (Linux 6.9,
// FUSE_NOTIFY_RESEND in its include/uapi/linux/fuse.h).
constexpr int kNotifyResend = 7;

// Of a request that the kernel never made: it counts them up from 2 and has the high bit for those
// that it sends again.
constexpr uint64_t kNoRequest = uint64_t{1} << 62;

// Of FuseSession::state().
constexpr std::string_view kStateVersion = "1";

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

// The kernel says POLLERR (fs/fuse/dev.c, fuse_dev_poll).
bool HasEnded(const UniqueFd& device) {
  pollfd connection{device.get(), 0, 0};
  return ::poll(&connection, 1, 0) != 0;
}

absl::StatusOr<std::unique_ptr<FuseSession>> FuseSession::Create(
    const Options& options, const fuse_lowlevel_ops& operations, void* owner) {
  std::unique_ptr<FuseSession> self(new FuseSession(options, owner));
  fuse_lowlevel_ops complete = operations;
  complete.init = &FuseSession::Init;
  char name[] = "lamina";
  char* arguments[] = {name, nullptr};
  fuse_args args = FUSE_ARGS_INIT(1, arguments);
  self->session_ = ::fuse_session_new(&args, &complete, sizeof(complete), self.get());
  ::fuse_opt_free_args(&args);
  if (self->session_ == nullptr) return absl::ResourceExhaustedError("fuse_session_new failed");
  return self;
}

absl::StatusOr<std::unique_ptr<FuseSession>> FuseSession::Start(const Options& options,
                                                                const fuse_lowlevel_ops& operations,
                                                                void* owner) {
  ASSIGN_OR_RETURN(std::unique_ptr<FuseSession> self, Create(options, operations, owner));
  ASSIGN_OR_RETURN(self->mountpoint_, RealPath(options.mount.mountpoint), "mount FUSE");
  FuseMountOptions mount = options.mount;
  mount.mountpoint = self->mountpoint_;
  ASSIGN_OR_RETURN(UniqueFd device, MountFuse(mount));
  RETURN_IF_ERROR(self->UseDevice(std::move(device)));
  ASSIGN_OR_RETURN(const auto info, FindMountAt(self->mountpoint_));
  if (info) self->device_ = info->device;
  RETURN_IF_ERROR(self->StartThreads(), "mount FUSE at {}", mount.mountpoint);
  return self;
}

absl::StatusOr<std::unique_ptr<FuseSession>> FuseSession::TakeOver(
    const Options& options, FuseHandover handover, const fuse_lowlevel_ops& operations,
    void* owner) {
  const std::string what = "take over FUSE at " + options.mount.mountpoint;
  ASSIGN_OR_RETURN(std::unique_ptr<FuseSession> self, Create(options, operations, owner));
  self->leave_mounted_ = true;  // until it serves
  // Not resolved: whoever waits for this process may have the directory locked.
  self->mountpoint_ = options.mount.mountpoint;
  if (HasEnded(handover.device)) {
    return absl::UnavailableError(what + ": it was unmounted or aborted");
  }
  RETURN_IF_ERROR(self->UseDevice(std::move(handover.device)), "{}", what);
  RETURN_IF_ERROR(self->RestoreState(handover.state), "{}", what);
  // libfuse wants to see the kernel's first request, which was answered long ago. To its reply the
  // kernel says ENOENT, which libfuse takes for an interrupted request's.
  fuse_buf first{};
  first.mem = self->init_request_.data();
  first.size = self->init_request_.size();
  ::fuse_session_process_buf(self->session_, &first);
  if (!self->initialized_) return absl::DataLossError(what + ": its recorded state is damaged");

  RETURN_IF_ERROR(self->ResendRequests(handover.can_resend), "{}", what);
  RETURN_IF_ERROR(self->StartThreads(), "{}", what);
  self->leave_mounted_ = false;
  return self;
}

FuseSession::FuseSession(const Options& options, void* owner)
    : wanted_(options.capabilities), owner_(owner) {}

FuseSession::~FuseSession() {
  if (session_ == nullptr) return;
  // While requests are still answered, because fusermount3 looks at the directory.
  if (!leave_mounted_ && StillMounted()) Unmount(mountpoint_, /*detach=*/true).IgnoreError();
  StopThreads();
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return replies_ == 0; });
  }
  ::fuse_session_destroy(session_);  // closes the device
}

absl::Status FuseSession::UseDevice(UniqueFd device) {
  if (::fcntl(device.get(), F_SETFL, O_RDWR | O_NONBLOCK) != 0) {
    return ErrnoStatus(errno, "make the FUSE device non-blocking");
  }
  // For a path of this form libfuse mounts nothing and takes the descriptor over.
  ::fuse_session_mount(session_, fmt::format("/dev/fd/{}", device.Release()).c_str());
  return absl::OkStatus();
}

absl::Status FuseSession::ResendRequests(bool can_resend) {
  fuse_out_header resend{.len = sizeof(resend), .error = kNotifyResend, .unique = 0};
  if (can_resend && ::write(device(), &resend, sizeof(resend)) > 0) return absl::OkStatus();
  if (can_resend && errno != EINVAL) return ErrnoStatus(errno, "have requests sent again");
  // The kernel does not know how. What was read is queued at the descriptor that it was read from:
  // without it these requests fail, which is better than waiting for ever. The connection needs
  // another one to go on, then (Linux, fs/fuse/dev.c, fuse_dev_release).
  ASSIGN_OR_RETURN(const UniqueFd clone, OpenFile("/dev/fuse", O_RDWR | O_NONBLOCK));
  auto source = static_cast<uint32_t>(device());
  if (::ioctl(clone.get(), FUSE_DEV_IOC_CLONE, &source) != 0 ||
      ::dup3(clone.get(), device(), O_CLOEXEC) < 0) {
    return ErrnoStatus(errno, "clone the FUSE device");
  }
  has_new_device_ = true;
  return absl::OkStatus();
}

int FuseSession::device() const { return ::fuse_session_fd(session_); }

std::string FuseSession::state() const {
  return fmt::format("{} {} {} {}", kStateVersion, negotiated_, device_,
                     absl::BytesToHexString(init_request_));
}

absl::Status FuseSession::RestoreState(const std::string& state) {
  const std::vector<std::string> fields = absl::StrSplit(state, ' ');
  uint64_t device = 0;
  if (fields.size() != 4 || fields[0] != kStateVersion ||
      !absl::SimpleAtoi(fields[1], &negotiated_) || !absl::SimpleAtoi(fields[2], &device) ||
      fields[3].size() % 2 != 0 ||
      !std::all_of(fields[3].begin(), fields[3].end(), absl::ascii_isxdigit)) {
    return absl::DataLossError("its recorded state is not understood");
  }
  device_ = device;
  init_request_ = absl::HexStringToBytes(fields[3]);
  fuse_in_header header{};
  if (init_request_.size() < sizeof(header) + sizeof(fuse_init_in)) {
    return absl::DataLossError("its recorded state is too short");
  }
  std::memcpy(&header, init_request_.data(), sizeof(header));
  if (header.opcode != FUSE_INIT || header.len != init_request_.size()) {
    return absl::DataLossError("its recorded state has no initial request");
  }
  header.unique = kNoRequest;
  std::memcpy(init_request_.data(), &header, sizeof(header));
  negotiated_before_ = true;
  return absl::OkStatus();
}

void FuseSession::Init(void* self, fuse_conn_info* connection) {
  FuseSession& session = *static_cast<FuseSession*>(self);
  connection->want |= session.wanted_ & connection->capable;
  // What is served never changes, so cached data need not be dropped when attributes are read anew.
  connection->want &= ~FUSE_CAP_AUTO_INVAL_DATA;
  connection->max_background = kMaxBackground;
  connection->congestion_threshold = kMaxBackground;
  // The kernel does as it was told by the first session, whatever this one would like.
  if (session.negotiated_before_) connection->want = session.negotiated_;
  session.negotiated_ = connection->want;
  session.capabilities_ = connection->want;
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
    if (length == 0 || length == -ENODEV) break;          // the connection is no more
    if (length < 0) {                                     // no memory, say: there is one still
      std::this_thread::sleep_for(kReceivePause);
      continue;
    }
    KeepInitRequest(request);
    ::fuse_session_process_buf(session_, &request);
  }
  ::free(request.mem);
  std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

// Before it is answered there is no other request.
void FuseSession::KeepInitRequest(const fuse_buf& request) {
  fuse_in_header header{};
  if (request.size < sizeof(header)) return;
  std::memcpy(&header, request.mem, sizeof(header));
  if (header.opcode != FUSE_INIT) return;
  std::lock_guard lock(mutex_);
  init_request_.assign(static_cast<const char*>(request.mem), request.size);
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

bool FuseSession::KernelHas(fuse_ino_t inode) {
  if (ended_) return false;
  // A negative offset leaves the content alone; ENOENT says that there is no such inode.
  return ::fuse_lowlevel_notify_inval_inode(session_, inode, -1, 0) == 0;
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
