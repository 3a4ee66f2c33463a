// SPDX-License-Identifier: Apache-2.0
//
// Profiles. What is accepted must come back the same after it is written, and name only what it says
// there is.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "fs/image/profile.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto profile = lamina::fs::Profile::Parse({reinterpret_cast<const char*>(data), size});
  if (!profile.ok()) return 0;
  for (const lamina::chunkstore::Touch& touch : profile->touches) {
    if (touch.blob >= profile->blobs.size()) std::abort();
  }
  const auto again = lamina::fs::Profile::Parse(profile->ToJson());
  if (!again.ok() || !(*again == *profile)) std::abort();
  return 0;
}
