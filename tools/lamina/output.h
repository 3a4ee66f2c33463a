// SPDX-License-Identifier: Apache-2.0
//
// What commands show: progress for people at a terminal, sizes that can be read, JSON for programs.
#ifndef LAMINA_TOOLS_LAMINA_OUTPUT_H_
#define LAMINA_TOOLS_LAMINA_OUTPUT_H_

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::cli {

// "512 B", "3.4 MiB".
std::string HumanSize(uint64_t bytes);
// Text on a stream. Unlike fmt::print it never throws: what happened to standard output is asked for
// once, with FinishOutput; that standard error cannot be written changes nothing.
void WriteText(std::FILE* stream, std::string_view text);
// On standard output.
template <typename... Args>
void PrintText(fmt::format_string<Args...> format, Args&&... args) {
  WriteText(stdout, fmt::format(format, std::forward<Args>(args)...));
}
// "lamina: TEXT" as a line on standard error.
void PrintError(std::string_view text);
// Fails if anything printed on standard output did not arrive. To be called at the end.
absl::Status FinishOutput();
// "4096", "20M": a number of bytes, with K, M, G or T for powers of 1024 (and KiB, MB and the like for
// the same). kInvalidArgument for anything else, and for 0.
absl::StatusOr<uint64_t> ParseSize(std::string_view text);
// JSON on standard output, indented.
void PrintJson(const nlohmann::json& value);
// Rows of equal length in aligned columns; the first row is the heading. Columns other than the
// first are right-aligned.
void PrintTable(const std::vector<std::vector<std::string>>& rows);

// One line on standard error that is rewritten as work goes on; nothing at all if standard error is
// not a terminal. The line is wiped when the object goes.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // Redraws at most ten times a second. `total` 0 means unknown.
  void Update(std::string_view what, uint64_t done, uint64_t total);

 private:
  const bool terminal_;
  bool drawn_ = false;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace lamina::cli

#endif  // LAMINA_TOOLS_LAMINA_OUTPUT_H_
