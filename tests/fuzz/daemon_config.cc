// SPDX-License-Identifier: Apache-2.0
//
// laminad's configuration file. What is accepted keeps what config.h promises.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tools/laminad/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto config =
      lamina::daemon::ParseConfig({reinterpret_cast<const char*>(data), size}, "config.toml");
  if (!config.ok()) {
    // It is the user's mistake, and the file is named.
    if (!absl::IsInvalidArgument(config.status())) std::abort();
    if (config.status().message().find("config.toml") == std::string_view::npos) std::abort();
    return 0;
  }
  if (!config->state.starts_with('/')) std::abort();
  if (config->give_up_after.count() < 1 || config->drain_for.count() < 1) std::abort();
  return 0;
}
