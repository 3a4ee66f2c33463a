// SPDX-License-Identifier: Apache-2.0
//
// Talks to the engine of a state directory, starting one if there is none.
#ifndef LAMINA_FS_ENGINE_CLIENT_H_
#define LAMINA_FS_ENGINE_CLIENT_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fs/engine/engine.h"

namespace lamina::fs {

// Calls may block for as long as the engine needs; each is one connection. After an unmount, and after
// an error, they also wait for the engine to end if it has nothing left to do. Replies are JSON as
// messages.h has it.
class Client {
 public:
  // `program` is started as `program serve --state=<state> --end-when-idle --ready-fd=N`, with
  // `engine_options` added, when an engine is needed.
  Client(std::string state, std::string program, std::vector<std::string> engine_options = {})
      : state_(std::move(state)),
        program_(std::move(program)),
        engine_options_(std::move(engine_options)) {}

  absl::StatusOr<nlohmann::json> Mount(const MountRequest& request);
  // An array of mounts.
  absl::StatusOr<nlohmann::json> Fork(ForkRequest request);
  absl::Status Unmount(const std::string& target);
  // An empty array if there is no engine.
  absl::StatusOr<nlohmann::json> Report(const std::optional<std::string>& target);
  // Any request of messages.h. kUnavailable if there is no engine and none is to be started.
  absl::StatusOr<nlohmann::json> Call(const nlohmann::json& request, bool start_engine);

  // What the node keeps (image_cache.h). Without an engine that runs, one is started for it.
  absl::StatusOr<nlohmann::json> ListCache();
  absl::StatusOr<nlohmann::json> CleanCache(std::optional<uint64_t> bytes);
  absl::Status PinImage(const std::string& image, bool pinned, const registry::Settings& registry);
  absl::StatusOr<nlohmann::json> RemoveImage(const std::string& image);

 private:
  absl::Status StartEngine();

  std::string state_;
  std::string program_;
  std::vector<std::string> engine_options_;
};

// /var/lib/lamina for root, $XDG_DATA_HOME/lamina or ~/.local/share/lamina for others.
std::string DefaultStateDirectory();

// The state directory of the engine that mounted an image at `target`, as the mount itself tells it.
// kNotFound if nothing is mounted there, or nothing of Lamina's; kFailedPrecondition if the mount cannot
// tell: paths that are too long for mount options are not in them (fs_context.h).
absl::StatusOr<std::string> StateOfMount(const std::string& target);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_CLIENT_H_
