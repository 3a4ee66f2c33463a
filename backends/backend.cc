// SPDX-License-Identifier: Apache-2.0
#include "backends/backend.h"

#include <fmt/ranges.h>

#include "backends/cgroup.h"
#include "chunkstore/base/disk_usage.h"

namespace lamina::backends {

absl::Status Backend::Pause(const std::string&, const Record& record) const {
  ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Of(record.cgroup));
  // A commit that has stopped it would let it go on.
  ASSIGN_OR_RETURN(const UniqueFd lock, group.Lock());
  return group.Freeze();
}

absl::Status Backend::Resume(const std::string&, const Record& record) const {
  ASSIGN_OR_RETURN(const Cgroup group, Cgroup::Of(record.cgroup));
  ASSIGN_OR_RETURN(const UniqueFd lock, group.Lock());
  return group.Thaw();
}

bool Backend::Paused(const std::string&, const Record& record) const {
  const absl::StatusOr<Cgroup> group = Cgroup::Of(record.cgroup);
  if (!group.ok() || !group->Frozen()) return false;
  // A commit stops it for a moment only, for which it has the lock.
  const absl::StatusOr<UniqueFd> lock = group->Lock();
  return group->Frozen() && !group->Processes().empty();
}

absl::Status Backend::Save(const std::string&, const std::string&) const {
  return absl::UnimplementedError(fmt::format("backend {} keeps no memory", name()));
}

absl::StatusOr<uint64_t> Backend::DiskBytes(const std::string& directory) const {
  ASSIGN_OR_RETURN(const DiskUsage written, DiskUsageOf(directory + "/disk/upper"));
  return static_cast<uint64_t>(written.bytes);
}

const std::vector<const Backend*>& Backends() {
  static const std::unique_ptr<Backend> fncall = MakeFnCallBackend();
  static const std::unique_ptr<Backend> container = MakeContainerBackend();
  static const std::unique_ptr<Backend> firecracker = MakeFirecrackerBackend();
  static const std::unique_ptr<Backend> qemu = MakeQemuBackend();
  static const std::vector<const Backend*> all = {fncall.get(), container.get(), firecracker.get(),
                                                  qemu.get()};
  return all;
}

absl::StatusOr<const Backend*> FindBackend(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Backend* backend : Backends()) {
    if (backend->name() == name) return backend;
    names.push_back(backend->name());
  }
  return absl::InvalidArgumentError(
      fmt::format("'{}' is no backend: {} are", name, fmt::join(names, ", ")));
}

absl::StatusOr<Choice> ChooseBackend(const TaskNeeds& needs) {
  std::vector<std::string> refusals;
  // From the weakest to the strongest.
  for (const Backend* backend : Backends()) {
    const Capabilities can = backend->capabilities();
    std::string lacks;
    if (needs.own_kernel && !can.own_kernel) {
      lacks = "has no kernel of its own";
    } else if (needs.root && !can.root) {
      lacks = "has no root";
    } else if ((needs.state || !needs.stateless) && !can.sessions) {
      lacks = "keeps no state";
    } else if (const absl::Status available = backend->Available(); !available.ok()) {
      lacks = fmt::format("cannot run here ({})", std::string(available.message()));
    } else {
      std::string reason = fmt::format("{} is the lightest that is enough", backend->name());
      if (!refusals.empty()) reason += fmt::format(": {}", fmt::join(refusals, ", "));
      if (const std::string note = backend->Note(); !note.empty()) reason += "; " + note;
      return Choice{backend, std::move(reason)};
    }
    refusals.push_back(fmt::format("{} {}", backend->name(), lacks));
  }
  return absl::FailedPreconditionError(
      fmt::format("no backend is enough: {}", fmt::join(refusals, ", ")));
}

}  // namespace lamina::backends
