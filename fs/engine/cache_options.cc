// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/cache_options.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>

namespace lamina::fs {
namespace {

constexpr std::string_view kUnits = "KMGT";
constexpr double kMaxBytes = 1ULL << 62;

}  // namespace

uint64_t Amount::Of(uint64_t file_system_bytes) const {
  return percent == 0 ? bytes : file_system_bytes / 100 * percent;
}

absl::StatusOr<Amount> ParseAmount(std::string_view text) {
  const auto error = [&] {
    return absl::InvalidArgumentError(fmt::format(
        "'{}' is not a size: want bytes, a number with K, M, G or T, or a percentage", text));
  };
  double number = 0;
  const auto [end, failed] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  const std::string_view unit = text.substr(static_cast<size_t>(end - text.data()));
  if (failed != std::errc() || !(number >= 0)) return error();
  if (unit == "%") {
    if (number < 1 || number > 100 || number != std::floor(number)) return error();
    return Amount{.percent = static_cast<uint32_t>(number)};
  }
  if (unit.size() > 1) return error();
  if (!unit.empty()) {
    const size_t power = kUnits.find(unit[0]);
    if (power == std::string_view::npos) return error();
    number *= static_cast<double>(uint64_t{1} << (10 * (power + 1)));
  }
  if (number > kMaxBytes) return error();
  return Amount{.bytes = static_cast<uint64_t>(number)};
}

absl::StatusOr<chunkstore::CacheLimits> LimitsFor(const CacheOptions& options,
                                                  const std::string& directory) {
  if (options.none) return chunkstore::CacheLimits{};
  struct statvfs info {};
  if (::statvfs(directory.c_str(), &info) != 0) return ErrnoStatus(errno, "statvfs " + directory);
  const uint64_t bytes = uint64_t{info.f_blocks} * info.f_frsize;
  return chunkstore::CacheLimits{.max_bytes = options.size.Of(bytes),
                                 .min_free = options.free.Of(bytes),
                                 .once_attached = options.once_used};
}

}  // namespace lamina::fs
