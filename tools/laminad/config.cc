// SPDX-License-Identifier: Apache-2.0
#include "tools/laminad/config.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <optional>
#include <system_error>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/registry/reference.h"
#include "chunkstore/registry/settings.h"
#include "fs/engine/client.h"

namespace lamina::daemon {
namespace {

constexpr uint64_t kMaxConfig = 1 << 20;

// Takes a value over, or says what it should have been.
using Setter = std::function<std::optional<std::string>(const toml::node&, Config&)>;

struct Key {
  std::string_view section;  // empty: above all sections
  std::string_view name;
  Setter set;
};

Setter Text(std::string Config::*field) {
  return [field](const toml::node& node, Config& config) -> std::optional<std::string> {
    const auto value = node.value_exact<std::string>();
    if (!value) return "a string";
    if (value->find('\0') != std::string::npos) return "a string without NUL";
    config.*field = *value;
    return std::nullopt;
  };
}

Setter AbsolutePath(std::string Config::*field, bool may_be_empty) {
  return
      [field, may_be_empty](const toml::node& node, Config& config) -> std::optional<std::string> {
        if (auto wanted = Text(field)(node, config)) return wanted;
        const std::string& path = config.*field;
        if (path.starts_with('/') || (may_be_empty && path.empty())) return std::nullopt;
        return "an absolute path";
      };
}

Setter Seconds(std::chrono::seconds Config::*field) {
  return [field](const toml::node& node, Config& config) -> std::optional<std::string> {
    constexpr int64_t kMax = 24 * 60 * 60;
    const auto value = node.value_exact<int64_t>();
    if (!value || *value < 1 || *value > kMax) {
      return fmt::format("a whole number of seconds, 1 to {}", kMax);
    }
    config.*field = std::chrono::seconds(*value);
    return std::nullopt;
  };
}

Setter SizeOf(fs::Amount fs::CacheOptions::*field) {
  return [field](const toml::node& node, Config& config) -> std::optional<std::string> {
    const auto text = node.value_exact<std::string>();
    const auto amount =
        text ? fs::ParseAmount(*text) : absl::StatusOr<fs::Amount>(absl::UnknownError(""));
    if (!amount.ok()) return "a size such as \"20G\", or a share of the disk such as \"50%\"";
    config.cache.*field = *amount;
    return std::nullopt;
  };
}

Setter TextList(std::vector<std::string> Config::*field, bool (*is_one)(const std::string&),
                const char* wanted) {
  return [=](const toml::node& node, Config& config) -> std::optional<std::string> {
    const toml::array* list = node.as_array();
    if (list == nullptr) return wanted;
    (config.*field).clear();
    for (const toml::node& element : *list) {
      const auto text = element.value_exact<std::string>();
      if (!text || !is_one(*text)) return wanted;
      (config.*field).push_back(*text);
    }
    return std::nullopt;
  };
}

bool IsHostWithPort(const std::string& text) {
  return registry::CheckHost(text).ok() && text.rfind(':') != std::string::npos;
}

bool BeginsAReference(const std::string& text) {
  return text.starts_with("docker://") || text.starts_with("oci:/");
}

bool IsMirror(const std::string& text) { return registry::Mirror::Parse(text).ok(); }

Setter Flag(bool Config::*field) {
  return [field](const toml::node& node, Config& config) -> std::optional<std::string> {
    const auto value = node.value_exact<bool>();
    if (!value) return "true or false";
    config.*field = *value;
    return std::nullopt;
  };
}

std::optional<std::string> SetCacheNone(const toml::node& node, Config& config) {
  const auto value = node.value_exact<bool>();
  if (!value) return "true or false";
  config.cache.none = *value;
  return std::nullopt;
}

std::optional<std::string> SetLevel(const toml::node& node, Config& config) {
  constexpr std::string_view kLevels[] = {"trace", "debug", "info", "warning", "error"};
  const auto value = node.value_exact<std::string>();
  if (!value || std::find(std::begin(kLevels), std::end(kLevels), *value) == std::end(kLevels)) {
    return fmt::format("one of {}", fmt::join(kLevels, ", "));
  }
  config.log_level = *value;
  return std::nullopt;
}

std::optional<std::string> SetFormat(const toml::node& node, Config& config) {
  const auto value = node.value_exact<std::string>();
  if (value != "text" && value != "json") return "text or json";
  config.log_json = value == "json";
  return std::nullopt;
}

bool IsPort(std::string_view text) {
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc() && end == text.data() + text.size() && port != 0;
}

std::optional<std::string> SetListen(const toml::node& node, Config& config) {
  if (auto wanted = Text(&Config::metrics_listen)(node, config)) return wanted;
  const std::string& listen = config.metrics_listen;
  if (listen.empty() || listen.starts_with("unix:/")) return std::nullopt;
  const size_t colon = listen.rfind(':');
  const bool known = !listen.starts_with("unix:") && colon != std::string::npos &&
                     IsPort(std::string_view(listen).substr(colon + 1));
  if (!known) return "unix:PATH with an absolute path, or ADDRESS:PORT with a port of 1 to 65535";
  return std::nullopt;
}

std::vector<Key> AllKeys() {
  return {
      {"", "state", AbsolutePath(&Config::state, /*may_be_empty=*/false)},
      {"cache", "size", SizeOf(&fs::CacheOptions::size)},
      {"cache", "free", SizeOf(&fs::CacheOptions::free)},
      {"cache", "none", SetCacheNone},
      {"log", "level", SetLevel},
      {"log", "format", SetFormat},
      {"api", "socket", AbsolutePath(&Config::api_socket, /*may_be_empty=*/true)},
      {"api", "group", Text(&Config::api_group)},
      {"snapshotter", "socket", AbsolutePath(&Config::snapshotter_socket, /*may_be_empty=*/true)},
      {"snapshotter", "group", Text(&Config::snapshotter_group)},
      {"snapshotter", "idle-seconds", Seconds(&Config::snapshotter_idle)},
      {"snapshotter", "containerd",
       AbsolutePath(&Config::containerd_socket, /*may_be_empty=*/false)},
      {"snapshotter", "registries",
       TextList(&Config::snapshotter_registries, IsHostWithPort, "a list of HOST:PORT")},
      {"snapshotter", "layer-images",
       TextList(&Config::snapshotter_layer_images, BeginsAReference,
                "a list of what begins with \"docker://\" or \"oci:/\"")},
      {"snapshotter", "referrers", Flag(&Config::snapshotter_referrers)},
      {"snapshotter", "prefetch", Flag(&Config::snapshotter_prefetch)},
      {"registry", "mirrors",
       TextList(&Config::registry_mirrors, IsMirror, "a list of \"[REGISTRY=]URL\"")},
      {"registry", "ca-file", AbsolutePath(&Config::registry_ca_file, /*may_be_empty=*/true)},
      {"registry", "plain-http", Flag(&Config::registry_plain_http)},
      {"metrics", "listen", SetListen},
      {"metrics", "group", Text(&Config::metrics_group)},
      {"take-over", "give-up-seconds", Seconds(&Config::give_up_after)},
      {"take-over", "drain-seconds", Seconds(&Config::drain_for)},
  };
}

absl::Status Wrong(const std::string& path, const toml::node& node, std::string_view what) {
  return absl::InvalidArgumentError(fmt::format("{}:{}: {}", path, node.source().begin.line, what));
}

absl::Status SetAll(const std::vector<Key>& keys, const toml::table& table,
                    std::string_view section, const std::string& path, Config& config) {
  for (const auto& [key, node] : table) {
    const std::string_view name = key.str();
    const std::string full =
        section.empty() ? std::string(name) : fmt::format("{}.{}", section, name);
    const auto is_section = [&](const Key& known) { return known.section == name; };
    const auto is_key = [&](const Key& known) {
      return known.section == section && known.name == name;
    };
    if (section.empty() && std::any_of(keys.begin(), keys.end(), is_section)) {
      const toml::table* inner = node.as_table();
      if (inner == nullptr) return Wrong(path, node, fmt::format("{} is not a section", full));
      RETURN_IF_ERROR(SetAll(keys, *inner, name, path, config));
      continue;
    }
    const auto known = std::find_if(keys.begin(), keys.end(), is_key);
    if (known == keys.end()) {
      return Wrong(path, node, fmt::format("{} is not a setting of laminad", full));
    }
    if (const auto wanted = known->set(node, config)) {
      return Wrong(path, node, fmt::format("{} is not {}", full, *wanted));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Config> ParseConfig(std::string_view text, const std::string& path) {
  Config config;
  config.state = fs::DefaultStateDirectory();
  try {
    const toml::table table = toml::parse(text, std::string_view(path));
    RETURN_IF_ERROR(SetAll(AllKeys(), table, "", path, config));
  } catch (const toml::parse_error& error) {
    return absl::InvalidArgumentError(
        fmt::format("{}:{}: {}", path, error.source().begin.line, error.description()));
  }
  return config;
}

absl::StatusOr<Config> ReadConfig(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path, kMaxConfig), "configuration");
  return ParseConfig(text, path);
}

}  // namespace lamina::daemon
