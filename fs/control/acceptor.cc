// SPDX-License-Identifier: Apache-2.0
#include "fs/control/acceptor.h"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <iterator>

#include "fs/engine/socket.h"

namespace lamina::fs {

absl::Status Acceptor::Start(const std::string& name) {
  stop_.Reset(::eventfd(0, EFD_CLOEXEC));
  if (!stop_.valid()) return ErrnoStatus(errno, "eventfd");
  thread_ = std::thread([this, name] { Run(name); });
  return absl::OkStatus();
}

void Acceptor::Stop() {
  if (stop_.valid()) ::eventfd_write(stop_.get(), 1);
  if (thread_.joinable()) thread_.join();
}

void Acceptor::Run(const std::string& name) {
  absl::Status failed;  // as long as it lasts
  while (true) {
    pollfd events[] = {{.fd = listener_.get(), .events = POLLIN},
                       {.fd = stop_.get(), .events = POLLIN}};
    if (::poll(events, std::size(events), -1) < 0 && errno != EINTR) {
      spdlog::error("{}: {}", name, std::string(ErrnoStatus(errno, "poll").message()));
      return;
    }
    if (events[1].revents != 0) return;
    if (events[0].revents == 0) continue;
    absl::StatusOr<UniqueFd> socket = AcceptUnix(listener_.get());
    if (!socket.ok() && failed.ok()) {
      spdlog::error("{}: {}", name, std::string(socket.status().message()));
    }
    failed = socket.status();
    if (socket.ok() && socket->valid()) handler_(*std::move(socket));
  }
}

}  // namespace lamina::fs
