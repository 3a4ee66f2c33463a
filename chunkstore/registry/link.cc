// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/link.h"

#include <algorithm>

#include "chunkstore/http/url.h"

namespace lamina::registry {
namespace {

// Takes what is before `separator` off `text`, and the separator. Those in quoted strings do not count.
std::string_view TakeUntil(char separator, std::string_view& text) {
  bool quoted = false;
  size_t end = 0;
  for (; end < text.size() && (quoted || text[end] != separator); ++end) {
    if (text[end] == '"') quoted = !quoted;
    if (quoted && text[end] == '\\') ++end;
  }
  end = std::min(end, text.size());
  const std::string_view taken = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return taken;
}

std::string_view Trimmed(std::string_view text, std::string_view characters) {
  text.remove_prefix(std::min(text.find_first_not_of(characters), text.size()));
  return text.substr(0, text.find_last_not_of(characters) + 1);
}

// `parameter` is `rel=next`, or `rel="prev next"`.
bool IsNext(std::string_view parameter) {
  const std::string_view name = Trimmed(TakeUntil('=', parameter), " \t");
  if (!http::EqualIgnoringCase(name, "rel")) return false;
  for (std::string_view relations = Trimmed(parameter, " \t\""); !relations.empty();) {
    if (http::EqualIgnoringCase(TakeUntil(' ', relations), "next")) return true;
  }
  return false;
}

}  // namespace

std::string NextLink(std::string_view header) {
  while (true) {
    const size_t begin = header.find('<');
    if (begin == std::string_view::npos) return "";
    const size_t end = header.find('>', begin);
    if (end == std::string_view::npos) return "";
    const std::string_view target = header.substr(begin + 1, end - begin - 1);
    header.remove_prefix(end + 1);
    for (std::string_view parameters = TakeUntil(',', header); !parameters.empty();) {
      if (IsNext(TakeUntil(';', parameters))) return std::string(target);
    }
  }
}

}  // namespace lamina::registry
