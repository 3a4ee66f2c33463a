// SPDX-License-Identifier: Apache-2.0
//
// Requests about profiles and prefetching on the control socket (messages.h):
//   {"op": "profile-start", "target": DIR}             {}
//   {"op": "profile-stop", "target": DIR}              {"profile": text of the profile}
//   {"op": "prefetch-start", ...PrefetchRequest}       {"id": N}
//   {"op": "prefetch-report", "id": N}                 PrefetchReport
//   {"op": "prefetch-cancel", "id": N}                 {}
#ifndef LAMINA_FS_ENGINE_PREFETCH_MESSAGES_H_
#define LAMINA_FS_ENGINE_PREFETCH_MESSAGES_H_

#include <nlohmann/json.hpp>
#include <string_view>

#include "fs/engine/engine.h"

namespace lamina::fs {

bool IsPrefetchOp(std::string_view op);
absl::StatusOr<nlohmann::json> ExecutePrefetchOp(Engine& engine, std::string_view op,
                                                 const nlohmann::json& request);

nlohmann::json ToJson(const PrefetchRequest& request);
absl::StatusOr<PrefetchRequest> ParsePrefetchRequest(const nlohmann::json& json);
nlohmann::json ToJson(const PrefetchReport& report);
absl::StatusOr<PrefetchReport> ParsePrefetchReport(const nlohmann::json& json);

// A part of a mount request.
nlohmann::json ToJson(const PrefetchOptions& options);
absl::StatusOr<PrefetchOptions> ParsePrefetchOptions(const nlohmann::json& json);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_PREFETCH_MESSAGES_H_
