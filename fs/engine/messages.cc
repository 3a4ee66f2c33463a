// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/messages.h"

#include "chunkstore/base/json.h"
#include "fs/engine/prefetch_messages.h"

namespace lamina::fs {
namespace {

using nlohmann::json;

json Microseconds(std::chrono::nanoseconds duration) {
  return static_cast<double>(duration.count()) / 1000.0;
}

json ToJson(const chunkstore::LatencyHistogram& latency) {
  return {{"count", latency.count()},
          {"p50_us", Microseconds(latency.Quantile(0.50))},
          {"p95_us", Microseconds(latency.Quantile(0.95))},
          {"p99_us", Microseconds(latency.Quantile(0.99))}};
}

const json* Find(const json& object, std::string_view name) {
  if (!object.is_object()) return nullptr;
  const auto field = object.find(std::string(name));
  return field == object.end() ? nullptr : &*field;
}

}  // namespace

absl::StatusOr<Transport> ParseTransport(std::string_view text) {
  for (const Transport transport : {Transport::kAuto, Transport::kErofs, Transport::kFuse}) {
    if (text == TransportName(transport)) return transport;
  }
  return absl::InvalidArgumentError(
      fmt::format("transport '{}' is not one of auto, erofs, fuse", text));
}

std::string_view TransportName(Transport transport) {
  switch (transport) {
    case Transport::kAuto:
      return "auto";
    case Transport::kErofs:
      return "erofs";
    case Transport::kFuse:
      return "fuse";
  }
  return "unknown";
}

json ToJson(const registry::Settings& settings, Secrets secrets) {
  json mirrors = json::array();
  for (const registry::Mirror& mirror : settings.mirrors) {
    mirrors.push_back({{"registry", mirror.registry}, {"url", mirror.url}});
  }
  json object = {{"plain_http", settings.plain_http},
                 {"ca_file", settings.ca_file},
                 {"auth_files", settings.credentials.files},
                 {"mirrors", mirrors}};
  if (secrets == Secrets::kLeftOut) return object;
  json& credentials = object["credentials"] = json::array();
  for (const auto& [host, credential] : settings.credentials.given) {
    credentials.push_back(
        {{"host", host}, {"username", credential.username}, {"password", credential.password}});
  }
  return object;
}

absl::StatusOr<registry::Settings> ParseRegistrySettings(const json& object) {
  registry::Settings settings;
  ASSIGN_OR_RETURN(settings.plain_http, BoolField(object, "plain_http"));
  ASSIGN_OR_RETURN(settings.ca_file, StringField(object, "ca_file"));
  const oci::Field fields(object, "registry");
  ASSIGN_OR_RETURN(settings.credentials.files, fields.OptionalStrings("auth_files"));
  ASSIGN_OR_RETURN(const std::optional<oci::Field> mirrors, fields.Find("mirrors"));
  if (mirrors) {
    ASSIGN_OR_RETURN(const std::vector<oci::Field> elements, mirrors->Elements());
    for (const oci::Field& element : elements) {
      registry::Mirror mirror;
      ASSIGN_OR_RETURN(mirror.registry, element.OptionalString("registry"));
      ASSIGN_OR_RETURN(mirror.url, element.OptionalString("url"));
      settings.mirrors.push_back(std::move(mirror));
    }
  }
  ASSIGN_OR_RETURN(const std::optional<oci::Field> credentials, fields.Find("credentials"));
  if (credentials) {
    ASSIGN_OR_RETURN(const std::vector<oci::Field> elements, credentials->Elements());
    for (const oci::Field& element : elements) {
      registry::CredentialSources::Given given;
      ASSIGN_OR_RETURN(given.host, element.OptionalString("host"));
      ASSIGN_OR_RETURN(given.credential.username, element.OptionalString("username"));
      ASSIGN_OR_RETURN(given.credential.password, element.OptionalString("password"));
      settings.credentials.given.push_back(std::move(given));
    }
  }
  return settings;
}

json ToJson(const MountRequest& request) {
  return {{"image", request.image},
          {"layer_images", request.layer_images},
          {"target", request.target},
          {"loop", request.loop},
          {"transport", TransportName(request.transport)},
          {"writable", request.writable},
          {"writable_dir", request.writable_dir},
          {"volatile", request.is_volatile},
          {"token", request.token},
          {"mount_namespace", request.mount_namespace},
          {"registry", ToJson(request.registry, Secrets::kIncluded)},
          {"record", request.record},
          {"prefetch", ToJson(request.prefetch)}};
}

json ToJson(const ForkRequest& request) {
  return {{"target", request.target},
          {"count", request.count},
          {"token", request.token},
          {"mount_namespace", request.mount_namespace}};
}

json ToJson(const MountDescription& mount) {
  json layer_images = json::array();
  for (const MountedImage& image : mount.layer_images) {
    layer_images.push_back({{"image", image.image},
                            {"manifest_digest", image.manifest_digest},
                            {"layers", image.layers}});
  }
  return {{"id", mount.id},
          {"image", mount.image},
          {"manifest_digest", mount.manifest_digest},
          {"layer_images", layer_images},
          {"target", mount.target},
          {"transport", TransportName(mount.transport)},
          {"loop", mount.loop},
          {"writable", mount.writable},
          {"upper", mount.upper},
          {"lower_uppers", mount.lower_uppers},
          {"devices", mount.devices},
          {"reason", mount.reason}};
}

json ToJson(const MountReport& report) {
  const chunkstore::ReadStats& stats = *report.stats;
  json object = ToJson(report.mount);
  object["layers"] = report.layers;
  object["frames"] = report.frames;
  object["sharing"] = report.sharing;
  object["frames_present"] = report.frames_present;
  object["read_requests"] = stats.read_requests.load();
  object["read_bytes"] = stats.read_bytes.load();
  object["missed_requests"] = stats.missed_requests.load();
  object["failed_requests"] = stats.failed_requests.load();
  object["origin_requests"] = stats.origin_requests.load();
  object["fetched_bytes"] = stats.fetched_bytes.load();
  object["fetched_frames"] = stats.fetched_frames.load();
  object["copied_frames"] = stats.copied_frames.load();
  object["decompressed_bytes"] = stats.decompressed_bytes.load();
  object["written_bytes"] = stats.written_bytes.load();
  if (report.prefetch_stats != nullptr) {
    object["prefetched_bytes"] = report.prefetch_stats->fetched_bytes.load();
    object["prefetched_frames"] =
        report.prefetch_stats->fetched_frames.load() + report.prefetch_stats->copied_frames.load();
    object["prefetch_requests"] = report.prefetch_stats->origin_requests.load();
  }
  object["recording"] = stats.touches.recording();
  object["hit_latency"] = ToJson(stats.hit_latency);
  object["miss_latency"] = ToJson(stats.miss_latency);
  return object;
}

json ToJson(const CacheReport& report) {
  json images = json::array();
  for (const CachedImage& image : report.images) {
    json layers = json::array();
    for (const Digest& layer : image.layers) layers.push_back(layer.ToString());
    images.push_back({{"image", image.image},
                      {"manifest_digest", image.manifest_digest.ToString()},
                      {"layers", layers},
                      {"pinned", image.pinned},
                      {"mounted", image.mounted},
                      {"content_bytes", image.content_bytes},
                      {"present_bytes", image.present_bytes},
                      {"last_used", image.last_used}});
  }
  json blobs = json::array();
  for (const chunkstore::BlobStore::BlobUsage& blob : report.usage.blobs) {
    blobs.push_back({{"digest", blob.digest.ToString()},
                     {"attached", blob.attached},
                     {"pinned", blob.pinned},
                     {"content_bytes", blob.content_bytes},
                     {"present_bytes", blob.present_bytes},
                     {"last_used", blob.last_used}});
  }
  return {{"used_bytes", report.usage.used_bytes},
          {"limit_bytes", report.usage.limit_bytes},
          {"evicted_bytes", report.usage.evicted_bytes},
          {"images", images},
          {"blobs", blobs}};
}

json ToJson(const CacheCleanup& cleanup) {
  return {{"freed_bytes", cleanup.freed_bytes},
          {"removed_images", cleanup.removed_images},
          {"removed_blobs", cleanup.removed_blobs}};
}

absl::StatusOr<std::string> StringField(const json& object, std::string_view name) {
  const json* field = Find(object, name);
  if (field == nullptr || !field->is_string()) {
    return absl::InvalidArgumentError(fmt::format("field '{}' is not a string", name));
  }
  return field->get<std::string>();
}

absl::StatusOr<bool> BoolField(const json& object, std::string_view name) {
  const json* field = Find(object, name);
  if (field == nullptr || !field->is_boolean()) {
    return absl::InvalidArgumentError(fmt::format("field '{}' is not true or false", name));
  }
  return field->get<bool>();
}

absl::StatusOr<uint64_t> NumberField(const json& object, std::string_view name) {
  const json* field = Find(object, name);
  if (field == nullptr || !field->is_number_unsigned()) {
    return absl::InvalidArgumentError(fmt::format("field '{}' is not a whole number", name));
  }
  return field->get<uint64_t>();
}

absl::StatusOr<MountRequest> ParseMountRequest(const json& object) {
  MountRequest request;
  ASSIGN_OR_RETURN(request.image, StringField(object, "image"));
  ASSIGN_OR_RETURN(request.layer_images,
                   oci::Field(object, "mount request").OptionalStrings("layer_images"));
  ASSIGN_OR_RETURN(request.target, StringField(object, "target"));
  ASSIGN_OR_RETURN(const std::string transport, StringField(object, "transport"));
  ASSIGN_OR_RETURN(request.transport, ParseTransport(transport));
  ASSIGN_OR_RETURN(request.loop, BoolField(object, "loop"));
  ASSIGN_OR_RETURN(request.writable, BoolField(object, "writable"));
  ASSIGN_OR_RETURN(request.writable_dir, StringField(object, "writable_dir"));
  if (object.contains("volatile")) {  // older clients do not say
    ASSIGN_OR_RETURN(request.is_volatile, BoolField(object, "volatile"));
  }
  if (const json* settings = Find(object, "registry"); settings != nullptr) {
    ASSIGN_OR_RETURN(request.registry, ParseRegistrySettings(*settings));
  }
  if (object.contains("mount_namespace")) {
    ASSIGN_OR_RETURN(request.mount_namespace, StringField(object, "mount_namespace"));
  }
  if (object.contains("token")) {
    ASSIGN_OR_RETURN(request.token, StringField(object, "token"));
  }
  ASSIGN_OR_RETURN(request.record, BoolField(object, "record"));
  const json* prefetch = Find(object, "prefetch");
  if (prefetch == nullptr) return absl::InvalidArgumentError("field 'prefetch' is missing");
  ASSIGN_OR_RETURN(request.prefetch, ParsePrefetchOptions(*prefetch));
  return request;
}

absl::StatusOr<ForkRequest> ParseForkRequest(const json& object) {
  ForkRequest request;
  ASSIGN_OR_RETURN(request.target, StringField(object, "target"));
  ASSIGN_OR_RETURN(request.count, NumberField(object, "count"));
  ASSIGN_OR_RETURN(request.token, StringField(object, "token"));
  ASSIGN_OR_RETURN(request.mount_namespace, StringField(object, "mount_namespace"));
  return request;
}

absl::StatusOr<oci::ImageConfig> ConfigOf(const MountDescription& mount) {
  if (mount.config.empty()) {
    return absl::FailedPreconditionError(
        fmt::format("the engine that mounted {} is of an older version: restart it", mount.image));
  }
  ASSIGN_OR_RETURN(oci::ImageConfig config, oci::ImageConfig::Parse(mount.config),
                   "{}: configuration", mount.image);
  return config;
}

absl::StatusOr<MountDescription> ParseMountDescription(const json& object) {
  MountDescription mount;
  ASSIGN_OR_RETURN(mount.id, StringField(object, "id"));
  ASSIGN_OR_RETURN(mount.image, StringField(object, "image"));
  ASSIGN_OR_RETURN(mount.manifest_digest, StringField(object, "manifest_digest"));
  // Fields of later versions may be missing.
  const oci::Field fields(object, "mount");
  ASSIGN_OR_RETURN(const std::optional<oci::Field> layer_images, fields.Find("layer_images"));
  if (layer_images) {
    ASSIGN_OR_RETURN(const std::vector<oci::Field> elements, layer_images->Elements());
    for (const oci::Field& element : elements) {
      MountedImage image;
      ASSIGN_OR_RETURN(image.image, element.OptionalString("image"));
      ASSIGN_OR_RETURN(image.manifest_digest, element.OptionalString("manifest_digest"));
      ASSIGN_OR_RETURN(const oci::Field layers, element.Get("layers"));
      ASSIGN_OR_RETURN(image.layers, layers.Size());
      mount.layer_images.push_back(std::move(image));
    }
  }
  ASSIGN_OR_RETURN(mount.upper, fields.OptionalString("upper"));
  ASSIGN_OR_RETURN(mount.lower_uppers, fields.OptionalStrings("lower_uppers"));
  ASSIGN_OR_RETURN(mount.target, StringField(object, "target"));
  ASSIGN_OR_RETURN(const std::string transport, StringField(object, "transport"));
  ASSIGN_OR_RETURN(mount.transport, ParseTransport(transport));
  ASSIGN_OR_RETURN(mount.loop, BoolField(object, "loop"));
  ASSIGN_OR_RETURN(mount.writable, BoolField(object, "writable"));
  ASSIGN_OR_RETURN(mount.reason, StringField(object, "reason"));
  ASSIGN_OR_RETURN(mount.devices, fields.OptionalStrings("devices"));
  ASSIGN_OR_RETURN(mount.config, fields.OptionalString("config"));
  return mount;
}

json ErrorToJson(const absl::Status& status) {
  return {{"error", std::string(status.message())}, {"code", static_cast<int>(status.code())}};
}

absl::Status ErrorFromJson(const json& object) {
  const json* code = Find(object, "code");
  const absl::StatusOr<std::string> error = StringField(object, "error");
  constexpr uint64_t kMaxCode = chunkstore::kStatusCodes - 1;
  if (!error.ok() || code == nullptr || !code->is_number_unsigned() || *code == 0U ||
      code->get<uint64_t>() > kMaxCode) {
    const std::string text = object.dump(-1, ' ', false, json::error_handler_t::replace);
    return absl::InternalError(
        fmt::format("the engine's answer is not understood: '{}'", text.substr(0, 200)));
  }
  return absl::Status(static_cast<absl::StatusCode>(code->get<int>()), *error);
}

absl::StatusOr<json> ParseReply(std::string_view line) {
  json reply = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (const json* value = Find(reply, "ok"); value != nullptr) return *value;
  return ErrorFromJson(reply);
}

}  // namespace lamina::fs
