// SPDX-License-Identifier: Apache-2.0
//
// Stateless calls: a pool of warm jails (backends/fncall) on the image.
#include <unistd.h>

#include "backends/backend.h"
#include "backends/cgroup.h"
#include "backends/helper_process.h"

namespace lamina::backends {
namespace {

class FnCallBackend : public Backend {
 public:
  std::string_view name() const override { return "fncall"; }
  std::string_view description() const override {
    return "stateless calls in warm jails: namespaces, system call filter, control groups, no root";
  }
  Capabilities capabilities() const override { return {.call_files = true, .disk_limit = true}; }
  absl::Status Available() const override {
    if (::geteuid() != 0) return absl::FailedPreconditionError("calls need root to make jails");
    return Cgroup::Version().status();
  }
  absl::Status Start(const StartRequest& request, Record& record) const override;
};

absl::Status FnCallBackend::Start(const StartRequest& request, Record& record) const {
  return StartHelper(
      {
          request.helpers + "/lamina-fncall",
          "--rootfs=" + request.rootfs,
          "--cgroup=" + record.cgroup,
          fmt::format("--warm={}", request.warm),
          fmt::format("--memory-bytes={}", record.limits.memory_bytes),
          fmt::format("--cpu-millis={}", record.limits.cpu_millis),
          fmt::format("--processes={}", record.limits.processes),
          fmt::format("--disk-bytes={}", record.limits.disk_bytes),
          fmt::format("--ttl-ms={}", record.ttl_ms),
          fmt::format("--idle-ttl-ms={}", record.idle_ttl_ms),
      },
      {request.listener}, request.lock);
}

}  // namespace

std::unique_ptr<Backend> MakeFnCallBackend() { return std::make_unique<FnCallBackend>(); }

}  // namespace lamina::backends
