// SPDX-License-Identifier: Apache-2.0
//
// Programs and scripts, of which what they need is read. Nothing outside of the file may be asked for.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "fs/prefetch/program_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto read = [&](uint64_t offset, std::span<std::byte> into) {
    if (offset > size || into.size() > size - offset) std::abort();
    std::memcpy(into.data(), data + offset, into.size());
    return absl::OkStatus();
  };
  (void)lamina::fs::ReadProgramNeeds(size, read);
  return 0;
}
