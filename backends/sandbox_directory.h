// SPDX-License-Identifier: Apache-2.0
//
// The parts of a sandbox that lie on the host: its directory, the mounted image, the disk below it.
#ifndef LAMINA_BACKENDS_SANDBOX_DIRECTORY_H_
#define LAMINA_BACKENDS_SANDBOX_DIRECTORY_H_

#include <string>
#include <string_view>
#include <vector>

#include "backends/record.h"
#include "backends/sandbox.h"
#include "chunkstore/base/status.h"
#include "fs/engine/client.h"
#include "fs/engine/engine.h"

namespace lamina::backends {

// What launchers need to know of the machine.
struct LauncherOptions {
  std::string state;    // of the engine as well
  std::string program;  // `lamina`, to start engines with
  std::vector<std::string> engine_options;
  std::string helpers;  // directory with lamina-agent and lamina-fncall
};

std::string SandboxesDirectory(const LauncherOptions& options);
std::string SnapshotsDirectory(const LauncherOptions& options);
// What the names of snapshots that are being made begin with; their directories are locked.
inline constexpr std::string_view kHalfMadeSnapshot = ".making-";

// Makes disk/ and mounts the images on rootfs/, with those of the snapshot that is named in the record
// on top. With `disk_bytes`, disk/ is a file system of that size in disk.img. Returns what the mount is.
absl::StatusOr<fs::MountDescription> MountRootfs(const LauncherOptions& options,
                                                 const std::string& directory, const Record& record,
                                                 const registry::Settings& registry,
                                                 uint64_t disk_bytes);

// Mounts the images on rootfs/ as they are, for a kernel of its own that mounts its devices.
absl::StatusOr<fs::MountDescription> MountImage(const LauncherOptions& options,
                                                const std::string& directory, const Record& record,
                                                const registry::Settings& registry);

// Makes an empty file system of that size in a file, sparse.
absl::Status MakeDiskImage(const std::string& path, uint64_t bytes);

// Kills what runs, unmounts, and removes the directory. Whoever calls it has the directory's lock.
// What is not there does no harm. After an error what is left can be removed by another try.
absl::Status RemoveSandbox(const LauncherOptions& options, const std::string& directory);

// An engine for what is in the state directory.
fs::Client EngineClient(const LauncherOptions& options);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_SANDBOX_DIRECTORY_H_
