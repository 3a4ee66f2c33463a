// SPDX-License-Identifier: Apache-2.0
#include "backends/record.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>

#include "backends/agent/pseudo_file.h"
#include "chunkstore/base/json.h"

namespace lamina::backends {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxRecord = 8 << 20;

absl::StatusOr<uint32_t> Id(const oci::Field& record, std::string_view key) {
  ASSIGN_OR_RETURN(const oci::Field field, record.Get(key));
  ASSIGN_OR_RETURN(const uint64_t value, field.Size());
  if (value > std::numeric_limits<int32_t>::max()) return field.Error("too large");
  return static_cast<uint32_t>(value);
}

absl::StatusOr<uint64_t> Size(const oci::Field& record, std::string_view key) {
  ASSIGN_OR_RETURN(const oci::Field field, record.Get(key));
  return field.Size();
}

absl::StatusOr<std::string> Text(const oci::Field& record, std::string_view key) {
  ASSIGN_OR_RETURN(const oci::Field field, record.Get(key));
  return field.String();
}

uint64_t BoottimeMilliseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1'000'000;
}

std::string BootId() { return agent::ReadPseudoFile("/proc/sys/kernel/random/boot_id"); }

}  // namespace

absl::Status WriteRecord(const std::string& directory, const Record& record) {
  const json value = {
      {"version", 1},
      {"id", record.id},
      {"backend", record.backend},
      {"image", record.image},
      {"manifest_digest", record.manifest_digest},
      {"layers", record.layers},
      {"from_snapshot", record.from_snapshot},
      {"runtime", record.runtime},
      {"complete", record.complete ? 1 : 0},
      {"created_ms", record.created_ms},
      {"created_boottime_ms", record.created_boottime_ms},
      {"boot_id", record.boot_id},
      {"ttl_ms", record.ttl_ms},
      {"idle_ttl_ms", record.idle_ttl_ms},
      {"memory_bytes", record.limits.memory_bytes},
      {"cpu_millis", record.limits.cpu_millis},
      {"processes", record.limits.processes},
      {"disk_bytes", record.limits.disk_bytes},
      {"reclaim", record.reclaim ? 1 : 0},
      {"host_network", record.network == Network::kHost ? 1 : 0},
      {"environment", record.environment},
      {"uid", record.user.uid},
      {"gid", record.user.gid},
      {"groups", record.user.additional_gids},
      {"home", record.user.home},
      {"working_directory", record.working_directory},
      {"cgroup", record.cgroup},
      {"first_process", record.first_process},
  };
  std::string text;
  try {
    text = value.dump(2);
  } catch (const json::type_error& error) {
    return absl::InvalidArgumentError(fmt::format("record of a sandbox: {}", error.what()));
  }
  // It describes processes and mounts, which a machine's crash ends as well.
  return WriteFileAtomically(directory + "/record.json", text, 0600, Durability::kCached);
}

absl::StatusOr<Record> ReadRecord(const std::string& directory) {
  const std::string path = directory + "/record.json";
  ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path, kMaxRecord));
  ASSIGN_OR_RETURN(const json value, oci::ParseJson(text, path));
  const oci::Field fields(value, path);
  Record record;
  ASSIGN_OR_RETURN(record.id, Text(fields, "id"));
  ASSIGN_OR_RETURN(record.backend, Text(fields, "backend"));
  ASSIGN_OR_RETURN(record.image, Text(fields, "image"));
  ASSIGN_OR_RETURN(record.manifest_digest, Text(fields, "manifest_digest"));
  ASSIGN_OR_RETURN(record.layers, fields.OptionalStrings("layers"));
  ASSIGN_OR_RETURN(record.from_snapshot, Text(fields, "from_snapshot"));
  ASSIGN_OR_RETURN(record.runtime, Text(fields, "runtime"));
  ASSIGN_OR_RETURN(const uint64_t complete, Size(fields, "complete"));
  record.complete = complete != 0;
  ASSIGN_OR_RETURN(const uint64_t created, Size(fields, "created_ms"));
  record.created_ms = static_cast<int64_t>(created);
  ASSIGN_OR_RETURN(record.boot_id, fields.OptionalString("boot_id"));
  if (!record.boot_id.empty()) {
    ASSIGN_OR_RETURN(record.created_boottime_ms, Size(fields, "created_boottime_ms"));
  }
  ASSIGN_OR_RETURN(record.ttl_ms, Size(fields, "ttl_ms"));
  ASSIGN_OR_RETURN(record.idle_ttl_ms, Size(fields, "idle_ttl_ms"));
  ASSIGN_OR_RETURN(record.limits.memory_bytes, Size(fields, "memory_bytes"));
  ASSIGN_OR_RETURN(record.limits.cpu_millis, Size(fields, "cpu_millis"));
  ASSIGN_OR_RETURN(record.limits.processes, Size(fields, "processes"));
  ASSIGN_OR_RETURN(record.limits.disk_bytes, Size(fields, "disk_bytes"));
  ASSIGN_OR_RETURN(const uint64_t reclaim, Size(fields, "reclaim"));
  record.reclaim = reclaim != 0;
  ASSIGN_OR_RETURN(const uint64_t host_network, Size(fields, "host_network"));
  record.network = host_network != 0 ? Network::kHost : Network::kNone;
  ASSIGN_OR_RETURN(record.environment, fields.OptionalStrings("environment"));
  ASSIGN_OR_RETURN(record.user.uid, Id(fields, "uid"));
  ASSIGN_OR_RETURN(record.user.gid, Id(fields, "gid"));
  ASSIGN_OR_RETURN(const oci::Field groups, fields.Get("groups"));
  ASSIGN_OR_RETURN(const std::vector<oci::Field> group_fields, groups.Elements());
  for (const oci::Field& group : group_fields) {
    ASSIGN_OR_RETURN(const uint64_t gid, group.Size());
    record.user.additional_gids.push_back(static_cast<uint32_t>(gid));
  }
  ASSIGN_OR_RETURN(record.user.home, Text(fields, "home"));
  ASSIGN_OR_RETURN(record.working_directory, Text(fields, "working_directory"));
  ASSIGN_OR_RETURN(record.cgroup, Text(fields, "cgroup"));
  ASSIGN_OR_RETURN(const uint32_t process, Id(fields, "first_process"));
  record.first_process = static_cast<pid_t>(process);
  return record;
}

absl::Status CheckName(std::string_view name, std::string_view what) {
  constexpr size_t kMaxName = 64;
  const auto allowed = [](char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
           (letter >= '0' && letter <= '9') || letter == '.' || letter == '_' || letter == '-';
  };
  if (!name.empty() && name.size() <= kMaxName && name[0] != '.' &&
      std::ranges::all_of(name, allowed)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      fmt::format("'{}' is no name of a {}: up to {} letters, digits, '.', '_' and '-' are", name,
                  what, kMaxName));
}

absl::StatusOr<UniqueFd> LockDirectory(const std::string& path, bool wait) {
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if (wait) {
    while (::flock(fd.get(), LOCK_EX) != 0) {
      if (errno != EINTR) return ErrnoStatus(errno, "lock " + path);
    }
  } else {
    ASSIGN_OR_RETURN(const bool locked, TryLock(fd.get()), "lock {}", path);
    if (!locked) return absl::UnavailableError(fmt::format("{} is in use", path));
  }
  struct stat by_fd {};
  struct stat by_path {};
  if (::fstat(fd.get(), &by_fd) != 0 || ::lstat(path.c_str(), &by_path) != 0 ||
      by_fd.st_dev != by_path.st_dev || by_fd.st_ino != by_path.st_ino) {
    return absl::NotFoundError(fmt::format("{} is gone", path));
  }
  return fd;
}

int64_t NowMilliseconds() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

absl::Status SetCreated(Record& record) {
  record.created_ms = NowMilliseconds();
  record.created_boottime_ms = BoottimeMilliseconds();
  record.boot_id = BootId();
  if (record.boot_id.empty()) return absl::InternalError("the name of this boot cannot be read");
  return absl::OkStatus();
}

std::optional<std::chrono::milliseconds> Age(const Record& record) {
  if (record.boot_id.empty()) {
    return std::chrono::milliseconds(NowMilliseconds() - record.created_ms);
  }
  const uint64_t now = BoottimeMilliseconds();
  if (record.boot_id != BootId() || record.created_boottime_ms > now) return std::nullopt;
  return std::chrono::milliseconds(now - record.created_boottime_ms);
}

}  // namespace lamina::backends
