// SPDX-License-Identifier: Apache-2.0
//
// Reading JSON documents that come from outside. ParseJson refuses what different parsers
// understand differently (a key twice, text that is not UTF-8, something behind the end); Field
// reads a value with its type checked and knows the way to it, so that errors can say "manifest:
// layers[3].size: not a number".
#ifndef LAMINA_CHUNKSTORE_BASE_JSON_H_
#define LAMINA_CHUNKSTORE_BASE_JSON_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"

namespace lamina::oci {

// Documents larger than this are refused (registries allow 4 MiB manifests).
inline constexpr uint64_t kMaxDocumentSize = 8 << 20;

// `document` names the text in errors. Depth and size are limited.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, std::string_view document);

// `value` as text without white space, keys sorted: equal values give equal bytes.
std::string ToCanonicalJson(const nlohmann::json& value);

// A value inside a parsed document, which it borrows.
class Field {
 public:
  // The whole document.
  Field(const nlohmann::json& value, std::string_view document)
      : value_(&value), document_(document) {}

  // A member of this object. Go programs write null for an empty list or map: null counts as
  // missing.
  absl::StatusOr<std::optional<Field>> Find(std::string_view key) const;
  absl::StatusOr<Field> Get(std::string_view key) const;  // which must be there

  // The names of this object's members.
  absl::StatusOr<std::vector<std::string>> Keys() const;
  // The elements of this array.
  absl::StatusOr<std::vector<Field>> Elements() const;

  absl::StatusOr<std::string> String() const;
  // A size in bytes: an integer from 0 to 2^63 - 1.
  absl::StatusOr<uint64_t> Size() const;
  absl::StatusOr<Digest> AsDigest() const;
  absl::StatusOr<std::vector<std::string>> Strings() const;
  absl::StatusOr<std::map<std::string, std::string>> StringMap() const;

  // Members that may be missing, and are then empty.
  absl::StatusOr<std::string> OptionalString(std::string_view key) const;
  absl::StatusOr<std::vector<std::string>> OptionalStrings(std::string_view key) const;
  absl::StatusOr<std::map<std::string, std::string>> OptionalStringMap(std::string_view key) const;

  // kInvalidArgument that names this field.
  absl::Status Error(std::string_view problem) const;

 private:
  Field(const nlohmann::json& value, std::string_view document, std::string path)
      : value_(&value), document_(document), path_(std::move(path)) {}

  const nlohmann::json* value_;
  std::string document_;
  std::string path_;
};

}  // namespace lamina::oci

#endif  // LAMINA_CHUNKSTORE_BASE_JSON_H_
