// SPDX-License-Identifier: Apache-2.0
#include "backends/backend.h"

#include <fmt/ranges.h>

namespace lamina::backends {

const std::vector<const Backend*>& Backends() {
  static const std::unique_ptr<Backend> fncall = MakeFnCallBackend();
  static const std::unique_ptr<Backend> container = MakeContainerBackend();
  static const std::vector<const Backend*> all = {fncall.get(), container.get()};
  return all;
}

absl::StatusOr<const Backend*> FindBackend(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Backend* backend : Backends()) {
    if (backend->name() == name) return backend;
    names.push_back(backend->name());
  }
  return absl::InvalidArgumentError(
      fmt::format("'{}' is no backend: {} are", name, fmt::join(names, " and ")));
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
      return Choice{backend, std::move(reason)};
    }
    refusals.push_back(fmt::format("{} {}", backend->name(), lacks));
  }
  return absl::FailedPreconditionError(
      fmt::format("no backend is enough: {}", fmt::join(refusals, ", ")));
}

}  // namespace lamina::backends
