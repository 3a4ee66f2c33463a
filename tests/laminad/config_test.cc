// SPDX-License-Identifier: Apache-2.0
#include "tools/laminad/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <sstream>

namespace lamina::daemon {
namespace {

using ::testing::HasSubstr;

std::string Error(std::string_view text) {
  const absl::Status status = ParseConfig(text, "config.toml").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

TEST(Config, EverySettingIsRead) {
  const auto config = ParseConfig(R"(
state = "/srv/lamina"
[cache]
size = "20G"
free = "7%"
none = true
[log]
level = "debug"
format = "json"
[api]
socket = "/run/lamina/api.sock"
group = "users"
[snapshotter]
socket = "/run/lamina/snapshotter.sock"
group = "containerd"
containerd = "/run/other/containerd.sock"
registries = ["localhost:5000", "registry.example:443"]
layer-images = ["docker://registry.example/kits/", "oci:/srv/kits:"]
referrers = false
prefetch = false
idle-seconds = 9
[registry]
mirrors = ["https://mirror.example/", "docker.io=http://localhost:5000"]
ca-file = "/etc/lamina/ca.pem"
plain-http = true
[metrics]
listen = "127.0.0.1:9464"
group = "prometheus"
[take-over]
give-up-seconds = 7
drain-seconds = 3
)",
                                  "config.toml");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->state, "/srv/lamina");
  EXPECT_EQ(config->cache.size, fs::Amount{.bytes = uint64_t{20} << 30});
  EXPECT_EQ(config->cache.free, fs::Amount{.percent = 7});
  EXPECT_TRUE(config->cache.none);
  EXPECT_EQ(config->log_level, "debug");
  EXPECT_TRUE(config->log_json);
  EXPECT_EQ(config->api_socket, "/run/lamina/api.sock");
  EXPECT_EQ(config->api_group, "users");
  EXPECT_EQ(config->snapshotter_socket, "/run/lamina/snapshotter.sock");
  EXPECT_EQ(config->snapshotter_group, "containerd");
  EXPECT_EQ(config->containerd_socket, "/run/other/containerd.sock");
  EXPECT_EQ(config->snapshotter_registries,
            (std::vector<std::string>{"localhost:5000", "registry.example:443"}));
  EXPECT_EQ(config->snapshotter_layer_images,
            (std::vector<std::string>{"docker://registry.example/kits/", "oci:/srv/kits:"}));
  EXPECT_FALSE(config->snapshotter_referrers);
  EXPECT_FALSE(config->snapshotter_prefetch);
  EXPECT_EQ(config->snapshotter_idle, std::chrono::seconds(9));
  EXPECT_EQ(
      config->registry_mirrors,
      (std::vector<std::string>{"https://mirror.example/", "docker.io=http://localhost:5000"}));
  EXPECT_EQ(config->registry_ca_file, "/etc/lamina/ca.pem");
  EXPECT_TRUE(config->registry_plain_http);
  EXPECT_EQ(config->metrics_listen, "127.0.0.1:9464");
  EXPECT_EQ(config->metrics_group, "prometheus");
  EXPECT_EQ(config->give_up_after, std::chrono::seconds(7));
  EXPECT_EQ(config->drain_for, std::chrono::seconds(3));
}

TEST(Config, UnknownKeysAreNamedWithTheirLine) {
  EXPECT_EQ(Error("\nstat = \"/srv\"\n"), "config.toml:2: stat is not a setting of laminad");
  EXPECT_EQ(Error("[log]\nlevel = \"info\"\ncolour = 1\n"),
            "config.toml:3: log.colour is not a setting of laminad");
  EXPECT_THAT(Error("[logs]\n"), HasSubstr("config.toml:1: logs is not a setting"));
  EXPECT_THAT(Error("log = 1\n"), HasSubstr("log is not a section"));
}

TEST(Config, WrongTypesAndValuesAreNamedWithTheirLine) {
  EXPECT_EQ(Error("state = 7\n"), "config.toml:1: state is not a string");
  EXPECT_EQ(Error("state = \"lamina\"\n"), "config.toml:1: state is not an absolute path");
  EXPECT_EQ(Error("state = \"\"\n"), "config.toml:1: state is not an absolute path");
  EXPECT_THAT(Error("[cache]\nsize = 20\n"), HasSubstr(":2: cache.size is not a size such as"));
  EXPECT_THAT(Error("[cache]\nfree = \"much\"\n"), HasSubstr("cache.free is not a size such as"));
  EXPECT_THAT(Error("[cache]\nnone = 1\n"), HasSubstr("cache.none is not true or false"));
  EXPECT_THAT(Error("[log]\nlevel = \"loud\"\n"), HasSubstr(":2: log.level is not one of trace"));
  EXPECT_THAT(Error("[log]\nformat = true\n"), HasSubstr("log.format is not text or json"));
  EXPECT_THAT(Error("[metrics]\nlisten = \"9464\"\n"), HasSubstr("metrics.listen is not unix:"));
  EXPECT_THAT(Error("[metrics]\nlisten = \"unix:x\"\n"), HasSubstr("metrics.listen is not"));
  for (const char* port : {"", "0", "x", "65536", "99999", "+80", "80 "}) {
    EXPECT_THAT(Error(fmt::format("[metrics]\nlisten = \"127.0.0.1:{}\"\n", port)),
                HasSubstr(":2: metrics.listen is not"));
  }
  EXPECT_THAT(Error("[registry]\nmirrors = [\"ftp://x\"]\n"),
              HasSubstr("registry.mirrors is not a"));
  for (const char* value : {"0", "-1", "1.5", "\"30\"", "86401", "9223372036854775807"}) {
    EXPECT_THAT(Error(fmt::format("[take-over]\ngive-up-seconds = {}\n", value)),
                HasSubstr(":2: take-over.give-up-seconds is not a whole number"))
        << value;
  }
}

TEST(Config, WhatIsNotTomlIsNamedWithItsLine) {
  EXPECT_THAT(Error("state = \"/srv\"\n[log\n"), HasSubstr("config.toml:2: "));
  EXPECT_THAT(Error("state = \"/a\"\nstate = \"/b\"\n"), HasSubstr("config.toml:2: "));
}

TEST(Config, MissingFileIsNotFound) {
  EXPECT_TRUE(absl::IsNotFound(ReadConfig("/nonexistent/config.toml").status()));
}

TEST(Config, SampleShowsEverySettingWithItsDefault) {
  std::ifstream file(LAMINA_SAMPLE_CONFIG);
  std::stringstream content;
  content << file.rdbuf();
  ASSERT_TRUE(ParseConfig(content.str(), "config.toml").ok());
  const std::string text =
      std::regex_replace(content.str(), std::regex("(^|\n)#([a-z-]+ = )"), "$1$2");
  const auto config = ParseConfig(text, "config.toml");
  ASSERT_TRUE(config.ok()) << config.status();
  const Config defaults;
  EXPECT_EQ(config->state, "/var/lib/lamina");
  EXPECT_EQ(config->cache.size, defaults.cache.size);
  EXPECT_EQ(config->cache.free, defaults.cache.free);
  EXPECT_EQ(config->cache.none, defaults.cache.none);
  EXPECT_EQ(config->log_level, defaults.log_level);
  EXPECT_EQ(config->log_json, defaults.log_json);
  EXPECT_EQ(config->api_socket, defaults.api_socket);
  EXPECT_EQ(config->metrics_listen, defaults.metrics_listen);
  EXPECT_EQ(config->give_up_after, defaults.give_up_after);
  EXPECT_EQ(config->drain_for, defaults.drain_for);
  for (const char* key :
       {"state", "size", "free", "none", "level", "format", "socket", "group", "listen",
        "give-up-seconds", "drain-seconds", "mirrors", "ca-file", "plain-http"}) {
    EXPECT_THAT(content.str(), HasSubstr(fmt::format("\n#{} = ", key)));
  }
}

}  // namespace
}  // namespace lamina::daemon
