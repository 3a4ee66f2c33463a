// SPDX-License-Identifier: Apache-2.0
//
// Containers: crun or runc, with the agent as their first process. Commands start as its children: no
// program of the host has to be started for them, it can keep sessions, and it keeps control where a
// runtime would have to join what a hostile container prepared for it.
#include <fcntl.h>
#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "backends/agent_client.h"
#include "backends/backend.h"
#include "backends/cgroup.h"
#include "backends/compiled_filter.h"
#include "backends/crun.h"
#include "backends/oci_bundle.h"
#include "backends/seccomp_profile.h"

namespace lamina::backends {
namespace {

class ContainerBackend : public Backend {
 public:
  std::string_view name() const override { return "container"; }
  std::string_view description() const override {
    return "an OCI container (crun or runc): namespaces, system call filter, control groups";
  }
  Capabilities capabilities() const override {
    return {.sessions = true,
            .files = true,
            .pause = true,
            .disk_snapshot = true,
            .root = true,
            .host_network = true,
            .disk_limit = true};
  }
  absl::Status Available() const override;
  absl::Status Start(const StartRequest& request, Record& record) const override;
};

// Of this process; roots of some machines do not have all.
bool HasCapability(int capability) {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> sets{};
  if (::syscall(SYS_capget, &header, sets.data()) != 0) return false;
  const auto index = static_cast<size_t>(capability);
  return ((sets[index / 32].effective >> (index % 32)) & 1) != 0;
}

absl::Status ContainerBackend::Available() const {
  if (::geteuid() != 0) return absl::FailedPreconditionError("containers need root");
  if (!IsOnPath("crun") && !IsOnPath("runc")) {
    return absl::FailedPreconditionError("neither crun nor runc is on PATH");
  }
  return Cgroup::Version().status();
}

absl::Status ContainerBackend::Start(const StartRequest& request, Record& record) const {
  if (record.runtime.empty()) record.runtime = IsOnPath("crun") ? "crun" : "runc";
  if (record.runtime != "crun" && record.runtime != "runc") {
    return absl::InvalidArgumentError(
        fmt::format("'{}' is no runtime: crun and runc are", record.runtime));
  }
  // Made here and not by the runtime: limits are the same code for all backends.
  Limits limits = record.limits;
  const uint64_t processes = std::exchange(limits.processes, 0);
  ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Create(record.cgroup, limits));

  std::vector<std::string> arguments = {"--listen-fd=3",
                                        fmt::format("--capabilities={:x}", kSandboxCapabilities)};
  std::vector<int> descriptors = {request.listener};
  // Programs are counted without the agent: it answers, and starts others, when they are as many as
  // they may be. It cannot open their group itself: a container sees no control groups.
  UniqueFd programs;
  if (processes > 0) {
    ASSIGN_OR_RETURN(programs, group.MakePrograms());
    arguments.emplace_back("--group-fd=4");
    descriptors.push_back(programs.get());
  }
  if (record.ttl_ms > 0) arguments.push_back(fmt::format("--ttl-ms={}", record.ttl_ms));
  if (record.idle_ttl_ms > 0) {
    arguments.push_back(fmt::format("--idle-ttl-ms={}", record.idle_ttl_ms));
  }
  const bool is_crun = record.runtime == "crun";
  const CompiledFilter filter(request.directory + "/..", SeccompForContainers().dump(),
                              PathOf(record.runtime), record.boot_id);
  const std::string compiled = is_crun ? filter.Text() : "";
  ASSIGN_OR_RETURN(const std::string config,
                   SandboxBundleConfig({.rootfs = request.rootfs,
                                        .agent = request.helpers + "/lamina-agent",
                                        .arguments = std::move(arguments),
                                        .hostname = record.id,
                                        .cgroup = record.cgroup,
                                        .host_network = record.network == Network::kHost,
                                        .compiled_filter = compiled,
                                        .protect_agent = HasCapability(CAP_SYS_RESOURCE)}));
  RETURN_IF_ERROR(
      WriteFileAtomically(request.directory + "/config.json", config, 0600, Durability::kCached));
  const std::string root = request.directory + "/runtime";
  ASSIGN_OR_RETURN(record.first_process, StartDetached({.runtime = record.runtime,
                                                        .bundle = request.directory,
                                                        .id = record.id,
                                                        .root = root,
                                                        .descriptors = std::move(descriptors),
                                                        .lock = request.lock}));
  // If that fails the next one compiles it again.
  if (is_crun && compiled.empty()) {
    filter.Keep(fmt::format("{}/{}/seccomp.bpf", root, record.id)).IgnoreError();
  }
  // Once more: of a group of version 1 that it joins crun takes the limit of memory away.
  RETURN_IF_ERROR(Cgroup::Create(record.cgroup, limits).status());
  if (processes > 0) RETURN_IF_ERROR(group.LimitPrograms(record.first_process, processes));
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<Backend> MakeContainerBackend() { return std::make_unique<ContainerBackend>(); }

}  // namespace lamina::backends
