// SPDX-License-Identifier: Apache-2.0
//
// Makes sandboxes, and finds those that are there. What it needs to know is on the disk (record.h):
// launchers come and go, several at a time, and sandboxes stay.
#ifndef LAMINA_BACKENDS_LAUNCHER_H_
#define LAMINA_BACKENDS_LAUNCHER_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/backend.h"
#include "backends/record.h"
#include "backends/sandbox.h"
#include "backends/sandbox_directory.h"

namespace lamina::backends {

struct ListedSandbox {
  Record record;
  SandboxState state = SandboxState::kDead;
};

// Where the image of a sandbox is mounted. kNotFound if there is none of that id.
absl::StatusOr<std::string> RootfsOf(const std::string& state, const std::string& id);

// Thread-safe.
class Launcher {
 public:
  explicit Launcher(LauncherOptions options) : options_(std::move(options)) {}

  // Mounts the image and starts a sandbox on it; programs can be run in it when this returns. What
  // the backend cannot do is kUnimplemented. After an error nothing of it is left.
  absl::StatusOr<std::unique_ptr<Sandbox>> Create(const Backend& backend,
                                                  const SandboxOptions& options);

  // kNotFound if there is none of that id. It may be dead.
  absl::StatusOr<std::unique_ptr<Sandbox>> Find(const std::string& id);
  absl::StatusOr<std::vector<ListedSandbox>> List();

  // Removes what nobody waits for: sandboxes whose time to live is over, and what killed launchers
  // left half made. A sandbox that died by itself stays, dead, until it is stopped.
  absl::Status RemoveLeftovers();

  // Names of snapshots, sorted.
  absl::StatusOr<std::vector<std::string>> Snapshots();
  absl::Status RemoveSnapshot(const std::string& name);

 private:
  absl::Status Fill(Record& record, const Backend& backend, const SandboxOptions& options) const;

  const LauncherOptions options_;
};

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_LAUNCHER_H_
