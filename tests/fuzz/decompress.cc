// SPDX-License-Identifier: Apache-2.0
//
// The decompressors of layers. The first byte says how large the pieces are that the rest comes in;
// the result must not depend on it.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "fs/image/decompress.h"

namespace {

using lamina::fs::Compression;

constexpr size_t kMaxOutput = 1 << 20;  // bombs are not what is tested here

// Nothing if the data is refused.
std::optional<std::string> Decompress(Compression compression, std::span<const std::byte> data,
                                      size_t step) {
  const auto decompressor = lamina::fs::Decompressor::Create(compression);
  std::vector<std::byte> output(4096);
  std::string result;
  while (!data.empty()) {
    std::span<const std::byte> piece = data.first(std::min(step, data.size()));
    data = data.subspan(piece.size());
    for (size_t made = output.size(); !piece.empty() || made == output.size();) {
      const auto size = decompressor->Decompress(piece, output);
      if (!size.ok() || result.size() > kMaxOutput) return std::nullopt;
      made = *size;
      result += lamina::AsText(std::span(output).first(made));
    }
  }
  if (!decompressor->Finish().ok()) return std::nullopt;
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);
  for (const Compression compression : {Compression::kGzip, Compression::kZstd}) {
    const auto whole = Decompress(compression, bytes, bytes.size());
    if (Decompress(compression, bytes, data[0] + 1) != whole) std::abort();
  }
  return 0;
}
