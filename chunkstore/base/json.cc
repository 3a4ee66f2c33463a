// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/json.h"

#include <set>

namespace lamina::oci {
namespace {

using nlohmann::json;

// Image documents nest six deep; configurations carry some free-form maps.
constexpr size_t kMaxDepth = 32;

// Walks the document once, before it is built, to refuse what json::parse would let pass.
class Checker : public json::json_sax_t {
 public:
  const std::string& problem() const { return problem_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }

  bool start_object(std::size_t) override { return Descend(); }
  bool start_array(std::size_t) override { return Descend(); }
  bool end_object() override { return Ascend(); }
  bool end_array() override { return Ascend(); }

  bool key(string_t& name) override {
    const bool is_new = keys_.back().insert(name).second;
    if (!is_new) problem_ = fmt::format("the key '{}' is there twice in one object", name);
    return is_new;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    problem_ = fmt::format("not valid JSON at byte {}: {}", position, error.what());
    return false;
  }

 private:
  bool Descend() {
    keys_.emplace_back();
    const bool is_allowed = keys_.size() <= kMaxDepth;
    if (!is_allowed) problem_ = fmt::format("nested more than {} deep", kMaxDepth);
    return is_allowed;
  }
  bool Ascend() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of the objects and arrays that are open
  std::string problem_;
};

}  // namespace

absl::StatusOr<json> ParseJson(std::string_view text, std::string_view document) {
  if (text.size() > kMaxDocumentSize) {
    return absl::ResourceExhaustedError(fmt::format("{}: {} bytes, more than the {} allowed",
                                                    document, text.size(), kMaxDocumentSize));
  }
  Checker checker;
  if (!json::sax_parse(text, &checker)) {
    return absl::InvalidArgumentError(fmt::format("{}: {}", document, checker.problem()));
  }
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) {
    return absl::InvalidArgumentError(fmt::format("{}: not valid JSON", document));
  }
  return value;
}

std::string ToCanonicalJson(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

absl::Status Field::Error(std::string_view problem) const {
  if (path_.empty()) return absl::InvalidArgumentError(fmt::format("{}: {}", document_, problem));
  return absl::InvalidArgumentError(fmt::format("{}: {}: {}", document_, path_, problem));
}

absl::StatusOr<std::optional<Field>> Field::Find(std::string_view key) const {
  if (!value_->is_object()) return Error("not an object");
  const auto member = value_->find(key);
  if (member == value_->end() || member->is_null()) return std::optional<Field>();
  std::string path = path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
  return std::optional<Field>(Field(*member, document_, std::move(path)));
}

absl::StatusOr<Field> Field::Get(std::string_view key) const {
  ASSIGN_OR_RETURN(const std::optional<Field> field, Find(key));
  if (!field) return Error(fmt::format("'{}' is missing", key));
  return *field;
}

absl::StatusOr<std::vector<std::string>> Field::Keys() const {
  if (!value_->is_object()) return Error("not an object");
  std::vector<std::string> keys;
  for (const auto& [key, value] : value_->items()) keys.push_back(key);
  return keys;
}

absl::StatusOr<std::vector<Field>> Field::Elements() const {
  if (!value_->is_array()) return Error("not a list");
  std::vector<Field> elements;
  elements.reserve(value_->size());
  for (size_t i = 0; i < value_->size(); ++i) {
    elements.push_back(Field((*value_)[i], document_, fmt::format("{}[{}]", path_, i)));
  }
  return elements;
}

absl::StatusOr<std::string> Field::String() const {
  if (!value_->is_string()) return Error("not a string");
  return value_->get<std::string>();
}

absl::StatusOr<uint64_t> Field::Size() const {
  if (!value_->is_number()) return Error("not a number");
  if (!value_->is_number_integer()) return Error("not a whole number, or too large");
  if (!value_->is_number_unsigned()) return Error("negative");
  const uint64_t size = value_->get<uint64_t>();
  if (size > INT64_MAX) return Error(fmt::format("{} is too large", size));
  return size;
}

absl::StatusOr<Digest> Field::AsDigest() const {
  ASSIGN_OR_RETURN(const std::string text, String());
  absl::StatusOr<Digest> digest = Digest::Parse(text);
  if (!digest.ok()) return Error(std::string(digest.status().message()));
  return digest;
}

absl::StatusOr<std::vector<std::string>> Field::Strings() const {
  ASSIGN_OR_RETURN(const std::vector<Field> elements, Elements());
  std::vector<std::string> strings;
  strings.reserve(elements.size());
  for (const Field& element : elements) {
    ASSIGN_OR_RETURN(std::string text, element.String());
    strings.push_back(std::move(text));
  }
  return strings;
}

absl::StatusOr<std::map<std::string, std::string>> Field::StringMap() const {
  if (!value_->is_object()) return Error("not an object");
  std::map<std::string, std::string> strings;
  for (const auto& [key, value] : value_->items()) {
    if (!value.is_string()) return Error(fmt::format("the value of '{}' is not a string", key));
    strings.emplace(key, value.get<std::string>());
  }
  return strings;
}

absl::StatusOr<std::string> Field::OptionalString(std::string_view key) const {
  ASSIGN_OR_RETURN(const std::optional<Field> field, Find(key));
  return field ? field->String() : std::string();
}

absl::StatusOr<std::vector<std::string>> Field::OptionalStrings(std::string_view key) const {
  ASSIGN_OR_RETURN(const std::optional<Field> field, Find(key));
  return field ? field->Strings() : std::vector<std::string>();
}

absl::StatusOr<std::map<std::string, std::string>> Field::OptionalStringMap(
    std::string_view key) const {
  ASSIGN_OR_RETURN(const std::optional<Field> field, Find(key));
  return field ? field->StringMap() : std::map<std::string, std::string>();
}

}  // namespace lamina::oci
