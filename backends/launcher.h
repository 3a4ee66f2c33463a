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
  // Why no more is known of it than its id; OK if more is known. Another version may have made it.
  absl::Status problem;
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

  // Kills and removes a sandbox of which no more than the id need be known. kNotFound if there is none.
  // Waits for others who make, remove or look at it.
  absl::Status Remove(const std::string& id);

  // Removes what nobody waits for: sandboxes whose time to live is over, and sandboxes and snapshots that
  // killed launchers left half made. A sandbox that died by itself, or whose record cannot be read, stays until it is
  // removed. Names in its error what could not be removed; the others are.
  absl::Status RemoveLeftovers();

  // Names of snapshots, sorted.
  absl::StatusOr<std::vector<std::string>> Snapshots();
  absl::Status RemoveSnapshot(const std::string& name);

 private:
  std::string DirectoryOf(const std::string& id) const {
    return SandboxesDirectory(options_) + "/" + id;
  }
  bool IsLeftover(const std::string& id);
  absl::Status RemoveHalfMadeSnapshots() const;
  absl::Status Fill(Record& record, const Backend& backend, const SandboxOptions& options) const;

  const LauncherOptions options_;
};

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_LAUNCHER_H_
