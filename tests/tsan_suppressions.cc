// SPDX-License-Identifier: Apache-2.0
//
// Debian's libraries are not built for ThreadSanitizer, which therefore does not see how they
// synchronise: RocksDB's and gRPC's threads, what Abseil counts references and makes tables with, and
// how spdlog makes its first logger.
// Compiled into every test when they are checked for races.

extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_options();

extern "C" const char* __tsan_default_suppressions() {
  return "race:librocksdb.so\n"
         "race:rocksdb::\n"
         "race:libgrpc\n"
         "race:grpc::\n"
         "race:grpc_\n"
         "race:google::protobuf::\n"
         "race:absl::*::base_internal::StrError\n"
         "race:libabsl_\n"
         "race:absl::*::Status::Unref\n"
         "race:absl::*::synchronization_internal::\n"
         "race:absl::*::time_internal::cctz::\n"
         "race:libspdlog\n"
         "race:spdlog::logger\n";
}

// Some tests fork and go on in the child.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
