// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <string>

#include "chunkstore/http/client.h"
#include "chunkstore/http/curl_library.h"

namespace lamina::http {
namespace {

bool TakeNumber(std::string_view& text, uint64_t* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

bool Take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

}  // namespace

std::string Response::Header(std::string_view name) const {
  const auto header = headers.find(std::string(name));
  return header == headers.end() ? std::string() : header->second;
}

std::optional<std::chrono::seconds> ParseRetryAfter(std::string_view value,
                                                    std::chrono::system_clock::time_point now) {
  std::string_view rest = value;
  uint64_t seconds = 0;
  if (TakeNumber(rest, &seconds)) {
    if (!rest.empty() || seconds > INT32_MAX) return std::nullopt;
    return std::chrono::seconds(seconds);
  }
  if (!LoadCurl().ok()) return std::nullopt;
  const time_t date = Curl().getdate(std::string(value).c_str(), nullptr);
  if (date == -1) return std::nullopt;
  // Not a time_point of it: those of the system's clock end in the year 2262.
  const std::chrono::seconds pause =
      std::chrono::seconds(date) - std::chrono::floor<std::chrono::seconds>(now.time_since_epoch());
  if (pause.count() > INT32_MAX) return std::nullopt;
  return std::max(pause, std::chrono::seconds(0));
}

std::optional<ContentRange> ParseContentRange(std::string_view value) {
  ContentRange range;
  if (!Take(value, "bytes ") || !TakeNumber(value, &range.first) || !Take(value, "-") ||
      !TakeNumber(value, &range.last) || !Take(value, "/")) {
    return std::nullopt;
  }
  if (value != "*") {
    uint64_t size = 0;
    if (!TakeNumber(value, &size) || !value.empty()) return std::nullopt;
    range.size = size;
  }
  if (range.last < range.first || (range.size && range.last >= *range.size)) return std::nullopt;
  return range;
}

}  // namespace lamina::http
