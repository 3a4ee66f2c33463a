// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/reclaim.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "backends/agent/pseudo_file.h"
#include "chunkstore/base/file.h"

namespace lamina::agent {
namespace {

// Microseconds: how often pages are looked at, and how long what was seen is added up. Ages count the
// latter.
constexpr uint64_t kSample = 100'000;
constexpr uint64_t kAggregation = 2'000'000;
constexpr uint64_t kColdAge = 15;

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// What /proc/iomem has as memory of the system: persistent memory is other.
std::vector<Range> SystemMemory() {
  std::vector<Range> ranges;
  std::istringstream lines(ReadPseudoFile("/proc/iomem"));
  for (std::string line; std::getline(lines, line);) {
    Range range;
    // Parts of others are indented.
    if (line.starts_with(' ') || !line.ends_with(" : System RAM")) continue;
    if (std::sscanf(line.c_str(), "%lx-%lx", &range.begin, &range.end) != 2) continue;
    ++range.end;
    if (range.end > range.begin) ranges.push_back(range);
  }
  return ranges;
}

// Writes files below one directory, and keeps the first error.
class Settings {
 public:
  explicit Settings(std::string directory) : directory_(std::move(directory)) {}
  Settings& Set(const std::string& name, const std::string& value) {
    if (!status_.ok()) return *this;
    const std::string path = directory_ + "/" + name;
    const absl::StatusOr<UniqueFd> file = OpenFile(path, O_WRONLY);
    status_ = file.status();
    if (file.ok() && ::write(file->get(), value.data(), value.size()) < 0) {
      status_ = ErrnoStatus(errno, fmt::format("write '{}' to {}", value, path));
    }
    return *this;
  }
  Settings& Set(const std::string& name, uint64_t value) {
    return Set(name, std::to_string(value));
  }
  const absl::Status& status() const { return status_; }

 private:
  const std::string directory_;
  absl::Status status_;
};

}  // namespace

absl::Status StartReclaim() {
  const std::string kdamonds = "/sys/kernel/mm/damon/admin/kdamonds";
  if (::access(kdamonds.c_str(), F_OK) != 0) {
    return absl::UnimplementedError("the kernel has no DAMON in /sys");
  }
  const std::vector<Range> memory = SystemMemory();
  if (memory.empty()) return absl::InternalError("/proc/iomem shows no memory");
  Settings settings(kdamonds);
  settings.Set("nr_kdamonds", 1).Set("0/contexts/nr_contexts", 1);
  const std::string context = "0/contexts/0/";
  settings.Set(context + "operations", "paddr")
      .Set(context + "monitoring_attrs/intervals/sample_us", kSample)
      .Set(context + "monitoring_attrs/intervals/aggr_us", kAggregation)
      .Set(context + "monitoring_attrs/intervals/update_us", 10 * kAggregation)
      .Set(context + "targets/nr_targets", 1)
      .Set(context + "targets/0/regions/nr_regions", memory.size());
  for (size_t index = 0; index < memory.size(); ++index) {
    const std::string region = fmt::format("{}targets/0/regions/{}/", context, index);
    settings.Set(region + "start", memory[index].begin).Set(region + "end", memory[index].end);
  }
  constexpr uint64_t kAny = UINT64_MAX;
  const std::string scheme = context + "schemes/0/";
  settings.Set(context + "schemes/nr_schemes", 1)
      .Set(scheme + "action", "pageout")
      .Set(scheme + "access_pattern/sz/min", 4096)
      .Set(scheme + "access_pattern/sz/max", kAny)
      .Set(scheme + "access_pattern/nr_accesses/min", uint64_t{0})
      .Set(scheme + "access_pattern/nr_accesses/max", uint64_t{0})
      .Set(scheme + "access_pattern/age/min", kColdAge)
      .Set(scheme + "access_pattern/age/max", uint64_t{UINT32_MAX})
      // A tenth of a processor at the most.
      .Set(scheme + "quotas/ms", 100)
      .Set(scheme + "quotas/reset_interval_ms", 1000)
      // There is no swap to put anonymous memory into: it is passed over.
      .Set(scheme + "filters/nr_filters", 1)
      .Set(scheme + "filters/0/type", "anon")
      .Set(scheme + "filters/0/matching", "Y")
      .Set("0/state", "on");
  return settings.status();
}

}  // namespace lamina::agent
