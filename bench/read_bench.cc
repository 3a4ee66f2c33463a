// SPDX-License-Identifier: Apache-2.0
//
// Measures one way of reading on several mounted trees with the same content, turn by turn (A B A
// B), so that what disturbs the machine disturbs all of them. Prints JSON:
//   {"operation": ..., "unit": ..., "samples": {NAME: [{"rate": ...}, ...], ...}}
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/read_operations.h"

namespace lamina::bench {
namespace {

struct Subject {
  std::string name;
  Measurement measure;
};

absl::StatusOr<Subject> PrepareSubject(const std::string& argument, const ReadOperation& operation,
                                       const ReadOptions& options) {
  const size_t separator = argument.find('=');
  if (separator == std::string::npos) {
    return absl::InvalidArgumentError(fmt::format("'{}': want NAME=DIRECTORY", argument));
  }
  ASSIGN_OR_RETURN(Measurement measure, operation.prepare(argument.substr(separator + 1), options));
  return Subject{argument.substr(0, separator), std::move(measure)};
}

absl::Status Run(const std::string& name, const std::vector<std::string>& trees, int samples,
                 const ReadOptions& options) {
  const ReadOperation* operation = FindReadOperation(name);
  if (operation == nullptr) {
    return absl::InvalidArgumentError(fmt::format("no operation '{}'", name));
  }
  std::vector<Subject> subjects;
  for (const std::string& tree : trees) {
    ASSIGN_OR_RETURN(Subject subject, PrepareSubject(tree, *operation, options));
    subjects.push_back(std::move(subject));
  }
  nlohmann::json results = nlohmann::json::object();
  for (int i = 0; i < samples; ++i) {
    for (const Subject& subject : subjects) {
      ASSIGN_OR_RETURN(const Sample sample, subject.measure(), "{}", subject.name);
      results[subject.name].push_back(sample);
    }
  }
  const nlohmann::json report = {
      {"operation", name}, {"unit", operation->unit}, {"samples", results}};
  fmt::print("{}\n", report.dump(2));
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CLI::App app("Measures reads of mounted trees side by side.");
  app.footer("Operations:\n" + DescribeReadOperations());
  std::string operation;
  std::vector<std::string> trees;
  int samples = 5;
  ReadOptions options;
  app.add_option("operation", operation)->required();
  app.add_option("trees", trees, "NAME=DIRECTORY ...")->required();
  app.add_option("--samples", samples)->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--reads", options.reads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--readers", options.readers)->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--seconds", options.seconds)->check(CLI::Range(0.0, 60.0))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Run(operation, trees, samples, options);
  if (status.ok()) return 0;
  fmt::print(stderr, "read_bench: {}\n", std::string(status.message()));
  return 1;
}

}  // namespace
}  // namespace lamina::bench

int main(int argc, char** argv) { return lamina::bench::Main(argc, argv); }
