// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/challenge.h"

#include <algorithm>
#include <optional>

namespace lamina::registry {
namespace {

constexpr std::string_view kToken68Characters =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~+/";

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
  // What some schemes have in place of parameters (RFC 9110, section 11.2, token68): up to the end of
  // the challenge.
  bool TakeToken68() {
    const size_t length = std::min(rest_.find_first_not_of(kToken68Characters), rest_.size());
    const size_t padded = std::min(rest_.find_first_not_of('=', length), rest_.size());
    const size_t next = std::min(rest_.find_first_not_of(" \t", padded), rest_.size());
    if (length == 0 || (next < rest_.size() && rest_[next] != ',')) return false;
    rest_.remove_prefix(next);
    return true;
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
      scanner.TakeToken68();
      continue;
    }
    scanner.SkipSpace();
    const std::optional<std::string> value = scanner.TakeValue();
    if (challenges.empty() || !value) break;
    challenges.back().parameters.emplace(word, *value);
  }
  return challenges;
}

const Challenge* FindUsable(const std::vector<Challenge>& challenges) {
  const auto bearer = std::ranges::find_if(challenges, [](const Challenge& challenge) {
    return challenge.scheme == "bearer" && !challenge.Parameter("realm").empty();
  });
  if (bearer != challenges.end()) return &*bearer;
  const auto basic = std::ranges::find(challenges, "basic", &Challenge::scheme);
  return basic == challenges.end() ? nullptr : &*basic;
}

}  // namespace lamina::registry
