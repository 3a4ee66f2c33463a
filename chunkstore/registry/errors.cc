// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/errors.h"

#include "chunkstore/base/json.h"

namespace lamina::registry {
namespace {

constexpr size_t kMaxText = 300;

absl::StatusCode CodeOf(int status) {
  switch (status) {
    case 400:
      return absl::StatusCode::kInvalidArgument;
    case 401:
      return absl::StatusCode::kUnauthenticated;
    case 403:
      return absl::StatusCode::kPermissionDenied;
    case 404:
    case 410:
      return absl::StatusCode::kNotFound;
    case 405:
    case 501:
      return absl::StatusCode::kUnimplemented;
    case 416:
      return absl::StatusCode::kDataLoss;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

// The messages in {"errors": [{"code": ..., "message": ...}]}; empty if it is something else.
absl::StatusOr<std::string> Messages(std::string_view body) {
  ASSIGN_OR_RETURN(const nlohmann::json value, oci::ParseJson(body, "error"));
  ASSIGN_OR_RETURN(const oci::Field errors, oci::Field(value, "error").Get("errors"));
  ASSIGN_OR_RETURN(const std::vector<oci::Field> elements, errors.Elements());
  std::string text;
  for (const oci::Field& element : elements) {
    ASSIGN_OR_RETURN(const std::string code, element.OptionalString("code"));
    ASSIGN_OR_RETURN(const std::string message, element.OptionalString("message"));
    text += fmt::format("{}{}", text.empty() ? "" : "; ", message.empty() ? code : message);
  }
  return text;
}

std::string Printable(std::string_view text) {
  std::string printable(text.substr(0, kMaxText));
  for (char& c : printable) {
    if (c < ' ' || c > '~') c = ' ';
  }
  return printable;
}

}  // namespace

absl::Status ErrorOf(const http::Response& response) {
  std::string text = fmt::format("HTTP status {}", response.status);
  const absl::StatusOr<std::string> messages = Messages(response.body);
  if (messages.ok() && !messages->empty()) text += ": " + Printable(*messages);
  const std::string pause = response.Header("retry-after");
  if (!pause.empty()) text += ", asked for a pause (Retry-After: " + Printable(pause) + ")";
  return absl::Status(CodeOf(response.status), text);
}

}  // namespace lamina::registry
