// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/challenge.h"

#include <optional>

namespace lamina::registry {
namespace {

bool IsTokenCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

class Scanner {
 public:
  explicit Scanner(std::string_view text) : rest_(text) {}

  void SkipSpace() { Skip(" \t"); }
  void SkipListSeparators() { Skip(" \t,"); }
  bool Take(char c) {
    if (rest_.empty() || rest_[0] != c) return false;
    rest_.remove_prefix(1);
    return true;
  }
  // Empty if there is none.
  std::string_view TakeToken() {
    size_t length = 0;
    while (length < rest_.size() && IsTokenCharacter(rest_[length])) ++length;
    const std::string_view token = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return token;
  }
  // A token or a quoted string.
  std::optional<std::string> TakeValue() {
    if (!Take('"')) {
      const std::string_view token = TakeToken();
      if (token.empty()) return std::nullopt;
      return std::string(token);
    }
    std::string value;
    while (!rest_.empty()) {
      if (Take('"')) return value;
      if (Take('\\') && rest_.empty()) break;
      value += rest_[0];
      rest_.remove_prefix(1);
    }
    return std::nullopt;
  }
  bool at_end() const { return rest_.empty(); }

 private:
  void Skip(std::string_view characters) {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(characters), rest_.size()));
  }
  std::string_view rest_;
};

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

}  // namespace

std::string Challenge::Parameter(std::string_view name) const {
  const auto found = parameters.find(std::string(name));
  return found == parameters.end() ? std::string() : found->second;
}

std::vector<Challenge> ParseChallenges(std::string_view header) {
  std::vector<Challenge> challenges;
  Scanner scanner(header);
  // A word with "=" behind it is a parameter of the challenge before it, one without begins the next.
  for (scanner.SkipListSeparators(); !scanner.at_end(); scanner.SkipListSeparators()) {
    const std::string word = Lower(scanner.TakeToken());
    if (word.empty()) break;
    scanner.SkipSpace();
    if (!scanner.Take('=')) {
      challenges.push_back({.scheme = word});
      continue;
    }
    scanner.SkipSpace();
    const std::optional<std::string> value = scanner.TakeValue();
    if (challenges.empty() || !value) break;
    challenges.back().parameters.emplace(word, *value);
  }
  return challenges;
}

}  // namespace lamina::registry
