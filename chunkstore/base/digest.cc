// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/digest.h"

#include <openssl/evp.h>

#include <cstdlib>

namespace lamina {
namespace {

constexpr std::string_view kPrefix = "sha256:";
constexpr std::string_view kHexDigits = "0123456789abcdef";

}  // namespace

struct Hasher::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }

  void Start() {
    // Fetched once and never freed: EVP_sha256() would look the implementation up, under a lock, at
    // every start (crypto(7), "Performance").
    static const EVP_MD* const sha256 = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    // Fails only without memory or without SHA-256 in OpenSSL: nothing can go on then.
    if (evp == nullptr || EVP_DigestInit_ex2(evp, sha256, nullptr) != 1) std::abort();
  }
};

Hasher::Hasher() : context_(std::make_unique<Context>()) { context_->Start(); }
Hasher::~Hasher() = default;
Hasher::Hasher(Hasher&&) noexcept = default;
Hasher& Hasher::operator=(Hasher&&) noexcept = default;

void Hasher::Update(std::span<const std::byte> data) {
  EVP_DigestUpdate(context_->evp, data.data(), data.size());
}

Digest Hasher::Finish() {
  Digest digest;
  EVP_DigestFinal_ex(context_->evp, digest.bytes.data(), nullptr);
  context_->Start();
  return digest;
}

Digest Digest::Of(std::span<const std::byte> data) {
  Hasher hasher;
  hasher.Update(data);
  return hasher.Finish();
}

absl::StatusOr<Digest> Digest::Parse(std::string_view text) {
  Digest digest;
  const bool well_formed =
      text.starts_with(kPrefix) && text.size() == kPrefix.size() + 2 * digest.bytes.size();
  if (!well_formed) {
    return absl::InvalidArgumentError(fmt::format(
        "'{}' is not a digest of the form sha256:<64 hex digits>", text.substr(0, 100)));
  }
  text.remove_prefix(kPrefix.size());
  for (size_t i = 0; i < digest.bytes.size(); ++i) {
    const size_t high = kHexDigits.find(text[2 * i]);
    const size_t low = kHexDigits.find(text[2 * i + 1]);
    if (high == std::string_view::npos || low == std::string_view::npos) {
      return absl::InvalidArgumentError(fmt::format(
          "digest 'sha256:{}' has a character that is not a lower-case hex digit", text));
    }
    digest.bytes[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return digest;
}

std::string Digest::Hex() const {
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    hex += kHexDigits[byte >> 4];
    hex += kHexDigits[byte & 15];
  }
  return hex;
}

std::string Digest::ToString() const { return std::string(kPrefix) + Hex(); }

}  // namespace lamina
