// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/filter.h"

#include <absl/strings/str_join.h>
#include <re2/re2.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <utility>

namespace lamina::snapshotter {
namespace {

using Operator = Filter::Operator;
using Selector = Filter::Selector;

bool IsFieldCharacter(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
}

bool IsSpace(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

// Text is taken as bytes; what is not ASCII can only be in values and quotes, where it stays as it is.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  absl::StatusOr<std::vector<Selector>> Parse() {
    std::vector<Selector> selectors;
    do {
      ASSIGN_OR_RETURN(Selector selector, ParseSelector());
      selectors.push_back(std::move(selector));
    } while (Accept(','));
    SkipSpace();
    if (at_ != text_.size()) return Error("unexpected input");
    return selectors;
  }

 private:
  absl::StatusOr<Selector> ParseSelector() {
    Selector selector;
    do {
      ASSIGN_OR_RETURN(std::string field, ParseField());
      selector.path.push_back(std::move(field));
    } while (Accept('.'));
    SkipSpace();
    if (at_ == text_.size() || text_[at_] == ',') return selector;
    const std::string_view op = text_.substr(at_, 2);
    if (op == "==") {
      selector.op = Operator::kEqual;
    } else if (op == "!=") {
      selector.op = Operator::kNotEqual;
    } else if (op == "~=") {
      selector.op = Operator::kMatches;
    } else {
      return Error("expected an operator (==, != or ~=)");
    }
    at_ += op.size();
    ASSIGN_OR_RETURN(selector.value, ParseValue(selector.op == Operator::kMatches));
    if (selector.op == Operator::kMatches) {
      auto expression = std::make_shared<re2::RE2>(selector.value, re2::RE2::Quiet);
      if (!expression->ok()) return Error("bad regular expression: " + expression->error());
      selector.expression = std::move(expression);
    }
    return selector;
  }

  absl::StatusOr<std::string> ParseField() {
    SkipSpace();
    if (at_ < text_.size() && text_[at_] == '"') return ParseQuoted();
    const size_t begin = at_;
    while (at_ < text_.size() && IsFieldCharacter(text_[at_])) ++at_;
    if (at_ == begin) return Error("expected a field");
    return std::string(text_.substr(begin, at_ - begin));
  }

  absl::StatusOr<std::string> ParseValue(bool is_expression) {
    SkipSpace();
    if (at_ == text_.size()) return Error("expected a value");
    const char first = text_[at_];
    if (first == '"' || (is_expression && (first == '/' || first == '|'))) return ParseQuoted();
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != ',' && !IsSpace(text_[at_])) ++at_;
    if (at_ == begin) return Error("expected a value");
    return std::string(text_.substr(begin, at_ - begin));
  }

  absl::StatusOr<std::string> ParseQuoted() {
    const char quote = text_[at_++];
    std::string value;
    while (at_ < text_.size() && text_[at_] != quote) {
      const char c = text_[at_++];
      if (c == '\n') return Error("a quoted value ends with its line");
      if (c != '\\') {
        value += c;
        continue;
      }
      RETURN_IF_ERROR(ParseEscape(quote, value));
    }
    if (at_ == text_.size()) return Error("a quoted value does not end");
    ++at_;
    return value;
  }

  absl::Status ParseEscape(char quote, std::string& value) {
    if (at_ == text_.size()) return Error("a quoted value does not end");
    const char c = text_[at_++];
    constexpr std::string_view kNames = "abfnrtv";
    constexpr std::string_view kValues = "\a\b\f\n\r\t\v";
    if (const size_t i = kNames.find(c); i != std::string_view::npos) {
      value += kValues[i];
    } else if (c == '\\' || c == quote) {
      value += c;
    } else if (c == 'x') {
      ASSIGN_OR_RETURN(const uint32_t code, ParseDigits(2, 16));
      value += static_cast<char>(code);
    } else if (c == 'u' || c == 'U') {
      ASSIGN_OR_RETURN(const uint32_t code, ParseDigits(c == 'u' ? 4 : 8, 16));
      return AppendUtf8(code, value);
    } else if (c >= '0' && c <= '7') {
      --at_;
      ASSIGN_OR_RETURN(const uint32_t code, ParseDigits(3, 8));
      if (code > 0xFF) return Error("an escape is out of range");
      value += static_cast<char>(code);
    } else {
      return Error("unknown escape");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<uint32_t> ParseDigits(int count, uint32_t base) {
    uint32_t value = 0;
    for (int i = 0; i < count; ++i) {
      const char c = at_ < text_.size() ? text_[at_] : '\0';
      uint32_t digit = 16;
      if (c >= '0' && c <= '9') digit = static_cast<uint32_t>(c - '0');
      if (c >= 'a' && c <= 'f') digit = static_cast<uint32_t>(c - 'a' + 10);
      if (c >= 'A' && c <= 'F') digit = static_cast<uint32_t>(c - 'A' + 10);
      if (digit >= base) return Error("an escape has too few digits");
      value = value * base + digit;
      ++at_;
    }
    return value;
  }

  absl::Status AppendUtf8(uint32_t code, std::string& value) {
    const auto add = [&value](uint32_t byte) { value += static_cast<char>(byte); };
    if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return Error("no such character");
    if (code < 0x80) {
      add(code);
    } else if (code < 0x800) {
      add(0xC0 | code >> 6);
      add(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      add(0xE0 | code >> 12);
      add(0x80 | (code >> 6 & 0x3F));
      add(0x80 | (code & 0x3F));
    } else {
      add(0xF0 | code >> 18);
      add(0x80 | (code >> 12 & 0x3F));
      add(0x80 | (code >> 6 & 0x3F));
      add(0x80 | (code & 0x3F));
    }
    return absl::OkStatus();
  }

  void SkipSpace() {
    while (at_ < text_.size() && IsSpace(text_[at_])) ++at_;
  }
  bool Accept(char c) {
    SkipSpace();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  absl::Status Error(std::string_view problem) const {
    return absl::InvalidArgumentError(
        fmt::format("filter '{}', character {}: {}", text_, at_ + 1, problem));
  }

  const std::string_view text_;
  size_t at_ = 0;
};

std::string_view KindName(Kind kind) {
  switch (kind) {
    case Kind::kView:
      return "view";
    case Kind::kActive:
      return "active";
    case Kind::kCommitted:
      return "committed";
  }
  return "";
}

std::optional<std::string_view> FieldOf(const Snapshot& snapshot,
                                        const std::vector<std::string>& path) {
  if (path[0] == "labels") {
    // Names of labels have dots, quoted or not.
    const std::string name = absl::StrJoin(path.begin() + 1, path.end(), ".");
    const auto label = snapshot.labels.find(name);
    if (label == snapshot.labels.end()) return std::nullopt;
    return label->second;
  }
  if (path[0] == "name") return snapshot.name;
  if (path[0] == "parent") return snapshot.parent;
  if (path[0] == "kind") return KindName(snapshot.kind);
  return std::nullopt;
}

bool MatchesSelector(const Selector& selector, const Snapshot& snapshot) {
  const std::optional<std::string_view> field = FieldOf(snapshot, selector.path);
  switch (selector.op) {
    case Operator::kPresent:
      return field.has_value();
    case Operator::kEqual:
      return field == selector.value;
    case Operator::kNotEqual:
      return field.value_or("") != selector.value;
    case Operator::kMatches: {
      const std::string_view text = field.value_or("");
      return re2::RE2::PartialMatch(re2::StringPiece(text.data(), text.size()),
                                    *selector.expression);
    }
  }
  return false;
}

}  // namespace

absl::StatusOr<Filter> Filter::Parse(const std::vector<std::string>& texts) {
  Filter filter;
  filter.matches_all_ = texts.empty();
  for (const std::string& text : texts) {
    if (text.empty()) {
      filter.matches_all_ = true;
      continue;
    }
    ASSIGN_OR_RETURN(std::vector<Selector> selectors, Parser(text).Parse());
    filter.any_.push_back(std::move(selectors));
  }
  return filter;
}

bool Filter::Matches(const Snapshot& snapshot) const {
  const auto matches = [&snapshot](const Selector& selector) {
    return MatchesSelector(selector, snapshot);
  };
  return matches_all_ || std::ranges::any_of(any_, [&matches](const auto& all) {
           return std::ranges::all_of(all, matches);
         });
}

}  // namespace lamina::snapshotter
