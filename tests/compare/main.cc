// SPDX-License-Identifier: Apache-2.0
//
// compare_trees [--ignore=PROPERTY,...] [--max=N] LEFT RIGHT
//
// Prints the first N differences (20 if not given) and exits with 0 if there are none, 1 if there
// are some, 2 if a tree could not be read. compare_trees.h says what is compared.

#include <charconv>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"
#include "tests/compare/compare_trees.h"

namespace {

using lamina::compare::CompareOptions;

struct Arguments {
  CompareOptions options;
  std::vector<std::string> trees;
};

absl::Status ParseIgnore(std::string_view list, CompareOptions& options) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    ASSIGN_OR_RETURN(const auto property, lamina::compare::ParseProperty(list.substr(0, comma)));
    options.ignored.insert(property);
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Arguments> Parse(int argc, char** argv) {
  constexpr std::string_view kIgnore = "--ignore=";
  constexpr std::string_view kMax = "--max=";
  Arguments arguments;
  for (const std::string_view argument : std::vector<std::string_view>(argv + 1, argv + argc)) {
    if (argument.starts_with(kIgnore)) {
      RETURN_IF_ERROR(ParseIgnore(argument.substr(kIgnore.size()), arguments.options));
    } else if (argument.starts_with(kMax)) {
      const std::string_view number = argument.substr(kMax.size());
      const auto result = std::from_chars(number.data(), number.data() + number.size(),
                                          arguments.options.max_differences);
      if (result.ec != std::errc() || result.ptr != number.data() + number.size()) {
        return absl::InvalidArgumentError(fmt::format("{}: not a number", argument));
      }
    } else {
      arguments.trees.emplace_back(argument);
    }
  }
  if (arguments.trees.size() != 2) {
    return absl::InvalidArgumentError(
        "usage: compare_trees [--ignore=PROPERTY,...] [--max=N] LEFT RIGHT");
  }
  return arguments;
}

absl::StatusOr<lamina::compare::Comparison> Run(int argc, char** argv) {
  ASSIGN_OR_RETURN(const Arguments arguments, Parse(argc, argv));
  lamina::RaiseDescriptorLimit();  // two for each level of depth
  return lamina::compare::CompareTrees(arguments.trees[0], arguments.trees[1], arguments.options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto comparison = Run(argc, argv);
  if (!comparison.ok()) {
    fmt::print(stderr, "compare_trees: {}\n", std::string(comparison.status().message()));
    return 2;
  }
  for (const std::string& difference : comparison->differences) fmt::print("{}\n", difference);
  fmt::print("{} names and {} bytes compared, {} differences\n", comparison->entries,
             comparison->bytes, comparison->differences.size());
  return comparison->differences.empty() ? 0 : 1;
}
