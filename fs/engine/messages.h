// SPDX-License-Identifier: Apache-2.0
//
// Requests and replies on the control socket: one JSON object on a line each way, then the server
// closes. Requests: {"op": "mount" | "fork" | "unmount" | "report" | "cache-list" | "cache-clean" |
// "cache-pin" | "cache-remove", ...fields}, and those in prefetch_messages.h. Replies: {"ok": ...} or
// {"error": text, "code": absl status code}. The reply to an "unmount" that leaves the engine
// without work ends the connection only when the process has ended.
#ifndef LAMINA_FS_ENGINE_MESSAGES_H_
#define LAMINA_FS_ENGINE_MESSAGES_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "fs/engine/engine.h"

namespace lamina::fs {

// What crosses the socket has secrets in it, what is kept on a disk has none.
enum class Secrets { kIncluded, kLeftOut };
nlohmann::json ToJson(const registry::Settings& settings, Secrets secrets);
absl::StatusOr<registry::Settings> ParseRegistrySettings(const nlohmann::json& json);

nlohmann::json ToJson(const MountRequest& request);
nlohmann::json ToJson(const ForkRequest& request);
nlohmann::json ToJson(const MountDescription& mount);
nlohmann::json ToJson(const MountReport& report);
// MountDescription::config of what Engine::Mount() gave, parsed. kFailedPrecondition if it was an engine
// of a version that does not give it.
absl::StatusOr<oci::ImageConfig> ConfigOf(const MountDescription& mount);
nlohmann::json ToJson(const CacheReport& report);
nlohmann::json ToJson(const CacheCleanup& cleanup);

absl::StatusOr<MountRequest> ParseMountRequest(const nlohmann::json& json);
absl::StatusOr<ForkRequest> ParseForkRequest(const nlohmann::json& json);
absl::StatusOr<MountDescription> ParseMountDescription(const nlohmann::json& json);

// A field of an object; kInvalidArgument, naming it, if it is missing or of another type.
absl::StatusOr<std::string> StringField(const nlohmann::json& object, std::string_view name);
absl::StatusOr<bool> BoolField(const nlohmann::json& object, std::string_view name);
absl::StatusOr<uint64_t> NumberField(const nlohmann::json& object, std::string_view name);

nlohmann::json ErrorToJson(const absl::Status& status);
// Never OK: kInternal for what is no error's JSON.
absl::Status ErrorFromJson(const nlohmann::json& object);
// The value of a reply's "ok", or the error it carries.
absl::StatusOr<nlohmann::json> ParseReply(std::string_view line);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_MESSAGES_H_
