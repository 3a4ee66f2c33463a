// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/prefetch_messages.h"

#include "fs/engine/messages.h"

namespace lamina::fs {
using nlohmann::json;

absl::StatusOr<PrefetchRequest> ParsePrefetchRequest(const json& object) {
  PrefetchRequest request;
  ASSIGN_OR_RETURN(request.image, StringField(object, "image"));
  ASSIGN_OR_RETURN(request.profile_only, BoolField(object, "profile_only"));
  ASSIGN_OR_RETURN(request.bytes_per_second, NumberField(object, "bytes_per_second"));
  if (const auto settings = object.find("registry"); settings != object.end()) {
    ASSIGN_OR_RETURN(request.registry, ParseRegistrySettings(*settings));
  }
  return request;
}

bool IsPrefetchOp(std::string_view op) {
  return op.starts_with("prefetch-") || op.starts_with("profile-");
}

absl::StatusOr<json> ExecutePrefetchOp(Engine& engine, std::string_view op, const json& request) {
  if (op == "prefetch-start") {
    ASSIGN_OR_RETURN(const PrefetchRequest prefetch, ParsePrefetchRequest(request));
    return json{{"id", engine.prefetch_jobs().Start(prefetch)}};
  }
  if (op == "prefetch-report" || op == "prefetch-cancel") {
    ASSIGN_OR_RETURN(const uint64_t id, NumberField(request, "id"));
    if (op == "prefetch-cancel") {
      engine.prefetch_jobs().Cancel(id);
      return json::object();
    }
    ASSIGN_OR_RETURN(const PrefetchReport report, engine.prefetch_jobs().Report(id));
    return ToJson(report);
  }
  if (op == "profile-start" || op == "profile-stop") {
    ASSIGN_OR_RETURN(const std::string target, StringField(request, "target"));
    if (op == "profile-start") {
      RETURN_IF_ERROR(engine.StartRecording(target));
      return json::object();
    }
    ASSIGN_OR_RETURN(const Profile profile, engine.StopRecording(target));
    return json{{"profile", profile.ToJson()}};
  }
  return absl::InvalidArgumentError(fmt::format("unknown op '{}'", op));
}

json ToJson(const PrefetchRequest& request) {
  return {{"image", request.image},
          {"profile_only", request.profile_only},
          {"bytes_per_second", request.bytes_per_second},
          {"registry", ToJson(request.registry, Secrets::kIncluded)}};
}

json ToJson(const PrefetchReport& report) {
  json object = {{"image", report.image},       {"manifest_digest", report.manifest_digest},
                 {"finished", report.finished}, {"bytes_missing", report.bytes_missing},
                 {"bytes", report.bytes},       {"requests", report.requests},
                 {"frames", report.frames},     {"seconds", report.seconds}};
  if (!report.status.ok()) object.update(ErrorToJson(report.status));
  return object;
}

absl::StatusOr<PrefetchReport> ParsePrefetchReport(const json& object) {
  PrefetchReport report;
  ASSIGN_OR_RETURN(report.image, StringField(object, "image"));
  ASSIGN_OR_RETURN(report.manifest_digest, StringField(object, "manifest_digest"));
  ASSIGN_OR_RETURN(report.finished, BoolField(object, "finished"));
  ASSIGN_OR_RETURN(report.bytes_missing, NumberField(object, "bytes_missing"));
  ASSIGN_OR_RETURN(report.bytes, NumberField(object, "bytes"));
  ASSIGN_OR_RETURN(report.requests, NumberField(object, "requests"));
  ASSIGN_OR_RETURN(report.frames, NumberField(object, "frames"));
  const auto seconds = object.find("seconds");
  if (seconds == object.end() || !seconds->is_number()) {
    return absl::InvalidArgumentError("field 'seconds' is not a number");
  }
  report.seconds = seconds->get<double>();
  if (object.contains("error")) report.status = ErrorFromJson(object);
  return report;
}

json ToJson(const PrefetchOptions& options) {
  return {{"enabled", options.enabled},
          {"fill", options.fill},
          {"bytes_per_second", options.bytes_per_second}};
}

absl::StatusOr<PrefetchOptions> ParsePrefetchOptions(const json& object) {
  PrefetchOptions options;
  ASSIGN_OR_RETURN(options.enabled, BoolField(object, "enabled"));
  ASSIGN_OR_RETURN(options.fill, BoolField(object, "fill"));
  ASSIGN_OR_RETURN(options.bytes_per_second, NumberField(object, "bytes_per_second"));
  return options;
}

}  // namespace lamina::fs
