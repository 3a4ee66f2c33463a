// SPDX-License-Identifier: Apache-2.0
//
// laminad's configuration: a TOML file, documented by the sample beside this file (config.toml).
#ifndef LAMINA_TOOLS_LAMINAD_CONFIG_H_
#define LAMINA_TOOLS_LAMINAD_CONFIG_H_

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"
#include "fs/engine/cache_options.h"

namespace lamina::daemon {

inline constexpr const char* kDefaultConfigPath = "/etc/lamina/config.toml";

struct Config {
  std::string state;  // fs::DefaultStateDirectory() if the file does not say

  fs::CacheOptions cache;

  std::string log_level = "info";  // as spdlog names them
  bool log_json = false;           // one JSON object a line

  std::string api_socket;  // path of the gRPC socket; empty: none
  std::string api_group;   // members may use it; empty: only this user

  std::string snapshotter_socket;  // path, for containerd; empty: none
  std::string snapshotter_group;   // members may use it; empty: only this user
  std::chrono::seconds snapshotter_idle{60};
  std::string containerd_socket = "/run/containerd/containerd.sock";
  std::vector<std::string> snapshotter_registries;    // "HOST:PORT"
  std::vector<std::string> snapshotter_layer_images;  // what their references may begin with
  bool snapshotter_referrers = true;
  bool snapshotter_prefetch = true;

  std::vector<std::string> registry_mirrors;  // as registry::Mirror::Parse takes them
  std::string registry_ca_file;               // absolute; empty: none
  bool registry_plain_http = false;

  std::string metrics_listen;  // "unix:PATH" or "ADDRESS:PORT"; empty: none
  std::string metrics_group;   // members may connect to PATH; empty: only this user

  std::chrono::seconds give_up_after{30};
  std::chrono::seconds drain_for{10};
};

// The file's settings over the defaults. A key that is not known, a value of another type or out of
// range is kInvalidArgument and named with its line.
absl::StatusOr<Config> ParseConfig(std::string_view text, const std::string& path);
// kNotFound if there is no such file.
absl::StatusOr<Config> ReadConfig(const std::string& path);

}  // namespace lamina::daemon

#endif  // LAMINA_TOOLS_LAMINAD_CONFIG_H_
