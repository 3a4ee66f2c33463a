// SPDX-License-Identifier: Apache-2.0
//
// Debian's libraries are not built for ThreadSanitizer, which therefore does not see how they
// synchronise: RocksDB's threads, and tables that Abseil makes at their first use. Compiled into every
// test when they are checked for races.

extern "C" const char* __tsan_default_suppressions();

extern "C" const char* __tsan_default_suppressions() {
  return "race:librocksdb.so\n"
         "race:rocksdb::\n"
         "race:absl::*::base_internal::StrError\n";
}
