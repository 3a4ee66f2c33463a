// SPDX-License-Identifier: Apache-2.0
//
// Runs a command of an image in a container, for the commands that do so.
#ifndef LAMINA_TOOLS_LAMINA_RUN_H_
#define LAMINA_TOOLS_LAMINA_RUN_H_

#include <functional>
#include <string>
#include <vector>

#include "fs/engine/client.h"
#include "tools/lamina/commands.h"

namespace lamina::cli {

struct ContainerSummary {
  int exit_code = 0;
  double mount_milliseconds = 0;
  double run_milliseconds = 0;
};

struct ContainerOptions {
  std::string image;
  std::vector<std::string> layers;  // images on top of it
  std::string writable_dir;
  std::string state;
  CacheFlags cache;
  RegistryOptions registry;
  std::vector<std::string> command;
  fs::PrefetchOptions prefetch;
  bool record = false;  // a profile, for `started` and `ended` to take
  // Called with the mount point when the image is mounted, and again when the container has ended,
  // with the image still mounted. May be null.
  std::function<void(fs::Client& client, const std::string& rootfs)> started;
  std::function<absl::Status(fs::Client& client, const std::string& rootfs,
                             const ContainerSummary& summary)>
      ended;
};

// The container's exit code. Needs root.
absl::StatusOr<int> RunContainer(ContainerOptions options);

}  // namespace lamina::cli

#endif  // LAMINA_TOOLS_LAMINA_RUN_H_
