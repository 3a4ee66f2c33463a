// SPDX-License-Identifier: Apache-2.0
//
// What is written down of a sandbox, so that any later process finds it:
//
//   <state>/sandboxes/<id>/          mode 0700; a process that makes or removes it has its lock
//       record.json                  this record
//       agent.sock                   where its agent listens
//       machine.sock, console.log    of a virtual machine: see vm/control.h
//       rootfs/                      the mounted image
//       disk/                        what was written to it (upper/), and overlayfs' work/
//       snapshot/                    of the snapshot that it was started from: links of its image/
//   <state>/sandbox-snapshots/.making-*/  while it is made; then renamed, by who has its lock
//   <state>/sandbox-snapshots/<name>/
//       record.json                  of the sandbox it is of
//       image/                       an image layout with what to put on top of the sandbox' images
//       memory, disk.img             of a virtual machine, instead of that
#ifndef LAMINA_BACKENDS_RECORD_H_
#define LAMINA_BACKENDS_RECORD_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/oci_bundle.h"
#include "backends/sandbox.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {

struct Record {
  std::string id;
  std::string backend;  // Backend::name()
  std::string image;
  std::string manifest_digest;
  std::vector<std::string> layers;  // images on top of it, lowest first
  std::string from_snapshot;        // empty: from the image alone
  std::string runtime;
  bool complete =
      false;  // else it was being made, and whoever did so is gone if nobody has the lock
  int64_t created_ms = 0;  // since 1970: for people
  // The same by a clock that nobody sets: since the machine started, in the boot of this name, which is
  // empty in records of older versions.
  uint64_t created_boottime_ms = 0;
  std::string boot_id;
  uint64_t ttl_ms = 0;
  uint64_t idle_ttl_ms = 0;
  Limits limits;
  bool reclaim = true;
  Network network = Network::kNone;
  std::vector<std::string> environment;  // of all programs; HOME only if it was given
  User user;
  std::string working_directory = "/";
  std::string cgroup;
  pid_t first_process = 0;  // on the host
};

absl::Status WriteRecord(const std::string& directory, const Record& record);
absl::StatusOr<Record> ReadRecord(const std::string& directory);

// A name that people choose, for snapshots: letters, digits, '.', '_' and '-', at most 64, and no dot
// first.
absl::Status CheckName(std::string_view name, std::string_view what);

// An exclusive lock on a directory, if nobody else has one and it is still there: kUnavailable and
// kNotFound. With `wait`, once nobody else has one.
absl::StatusOr<UniqueFd> LockDirectory(const std::string& path, bool wait = false);

int64_t NowMilliseconds();

// Says in a record that its sandbox was made now.
absl::Status SetCreated(Record& record);
// Since then, suspended time included; nothing if it was made before the machine started.
std::optional<std::chrono::milliseconds> Age(const Record& record);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_RECORD_H_
