// SPDX-License-Identifier: Apache-2.0
//
// Debian's RocksDB is not built for ThreadSanitizer, which therefore does not see how its threads
// synchronise. Compiled into every test that uses it; without the sanitizer nobody calls it.

extern "C" const char* __tsan_default_suppressions();

extern "C" const char* __tsan_default_suppressions() {
  return "race:librocksdb.so\nrace:rocksdb::\n";
}
