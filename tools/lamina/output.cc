// SPDX-License-Identifier: Apache-2.0
#include "tools/lamina/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

namespace lamina::cli {

std::string HumanSize(uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

void WriteText(std::FILE* stream, std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stream);  // an error stays in the stream
}

void PrintError(std::string_view text) { WriteText(stderr, fmt::format("lamina: {}\n", text)); }

absl::Status FinishOutput() {
  errno = 0;
  const bool failed_before = std::ferror(stdout) != 0;
  if (std::fflush(stdout) == 0 && !failed_before) return absl::OkStatus();
  return ErrnoStatus(errno != 0 ? errno : EIO, "write standard output");
}

absl::StatusOr<uint64_t> ParseSize(std::string_view text) {
  const auto error = [text] {
    return absl::InvalidArgumentError(
        fmt::format("'{}' is not a number of bytes such as 4096, 512K or 20M", text));
  };
  uint64_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || value == 0) return error();
  std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  if (unit.empty()) return value;
  constexpr std::string_view kUnits = "KMGT";
  const size_t power = kUnits.find(static_cast<char>(std::toupper(unit[0])));
  unit.remove_prefix(1);
  if (power == std::string_view::npos || !(unit.empty() || unit == "B" || unit == "iB")) {
    return error();
  }
  const int shift = 10 * (static_cast<int>(power) + 1);
  if (value > (UINT64_MAX >> shift)) return error();
  return value << shift;
}

void PrintJson(const nlohmann::json& value) {
  PrintText("{}\n", value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

void PrintTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += i == 0 ? fmt::format("{:<{}}", row[i], widths[i])
                     : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    PrintText("{}\n", line);
  }
}

ProgressLine::ProgressLine() : terminal_(::isatty(STDERR_FILENO) != 0) {}

ProgressLine::~ProgressLine() {
  if (drawn_) WriteText(stderr, "\r\033[K");
}

void ProgressLine::Update(std::string_view what, uint64_t done, uint64_t total) {
  using std::chrono::steady_clock;
  const steady_clock::time_point now = steady_clock::now();
  if (!terminal_ || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const auto rate = static_cast<uint64_t>(static_cast<double>(done) / std::max(seconds, 0.001));
  const std::string amount = total == 0
                                 ? HumanSize(done)
                                 : fmt::format("{} of {} ({}%)", HumanSize(done), HumanSize(total),
                                               static_cast<int>(100.0 * static_cast<double>(done) /
                                                                static_cast<double>(total)));
  WriteText(stderr, fmt::format("\r{}: {}, {}/s\033[K", what, amount, HumanSize(rate)));
  std::fflush(stderr);
}

}  // namespace lamina::cli
