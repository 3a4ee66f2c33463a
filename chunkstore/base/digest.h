// SPDX-License-Identifier: Apache-2.0
//
// SHA-256 digests, as the OCI image specification names content ("sha256:" and 64 hex digits).
// Other algorithms are refused: nothing in Lamina would verify them.
#ifndef LAMINA_CHUNKSTORE_BASE_DIGEST_H_
#define LAMINA_CHUNKSTORE_BASE_DIGEST_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "chunkstore/base/status.h"

namespace lamina {

struct Digest {
  std::array<uint8_t, 32> bytes{};

  // "sha256:<64 lower-case hex digits>" and nothing else.
  static absl::StatusOr<Digest> Parse(std::string_view text);
  static Digest Of(std::span<const std::byte> data);

  std::string ToString() const;  // "sha256:..."
  std::string Hex() const;       // the 64 digits alone

  auto operator<=>(const Digest&) const = default;

  template <typename H>
  friend H AbslHashValue(H state, const Digest& digest) {
    return H::combine_contiguous(std::move(state), digest.bytes.data(), digest.bytes.size());
  }
};

// SHA-256 over data given piece by piece.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(Hasher&&) noexcept;
  Hasher& operator=(Hasher&&) noexcept;

  void Update(std::span<const std::byte> data);
  // The digest of all data so far; the hasher starts anew.
  Digest Finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_DIGEST_H_
