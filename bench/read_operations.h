// SPDX-License-Identifier: Apache-2.0
//
// The ways of reading a mounted tree that read_bench measures.
#ifndef LAMINA_BENCH_READ_OPERATIONS_H_
#define LAMINA_BENCH_READ_OPERATIONS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "chunkstore/base/status.h"

namespace lamina::bench {

// What one run gave, by name: "rate" (higher is better) in the unit of the operation, and for
// operations that time each call "p50_us" and "p99_us".
using Sample = std::map<std::string, double>;
using Measurement = std::function<absl::StatusOr<Sample>()>;

struct ReadOptions {
  uint64_t reads = 50'000;  // of 4 KiB, in a run of "random" and "cold-page"
  int readers = 1;          // threads of "cold-page"
  double seconds = 0.3;     // at least, for a run of an operation that is repeated
  std::string extended_attribute = "user.bench";
};

struct ReadOperation {
  const char* name;
  const char* unit;
  const char* description;
  // Lists what is to be read below `root` and, unless the operation is a cold one, reads it all
  // once, so that the measurement finds it in memory.
  absl::StatusOr<Measurement> (*prepare)(const std::string& root, const ReadOptions& options);
};

// Null if there is none of that name.
const ReadOperation* FindReadOperation(const std::string& name);
// Names and descriptions, for --help.
std::string DescribeReadOperations();

}  // namespace lamina::bench

#endif  // LAMINA_BENCH_READ_OPERATIONS_H_
