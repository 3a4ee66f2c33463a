// SPDX-License-Identifier: Apache-2.0
#include "backends/firecracker/api.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "backends/vm/machine.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

using nlohmann::json;

constexpr size_t kMaxAnswer = 64 << 10;

absl::StatusOr<UniqueFd> Connect(const std::string& directory) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSIGN_OR_RETURN(const UniqueFd place, OpenFile(directory, O_PATH | O_DIRECTORY));
  // The path may be longer than sockaddr_un allows.
  const std::string path = fmt::format("/proc/self/fd/{}/{}", place.get(), kFirecrackerApi);
  sockaddr_un address{.sun_family = AF_UNIX};
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoStatus(errno, "connect to Firecracker");
  }
  return socket;
}

// The number behind "Content-Length:" in the head of an answer; 0 if there is none.
size_t ContentLength(const std::string& head) {
  constexpr std::string_view kName = "\r\ncontent-length:";
  std::string lower = head;
  for (char& letter : lower) letter = static_cast<char>(std::tolower(letter));
  const size_t at = lower.find(kName);
  return at == std::string::npos ? 0 : std::strtoul(lower.c_str() + at + kName.size(), nullptr, 10);
}

// Head and body.
absl::StatusOr<std::pair<std::string, std::string>> ReadAnswer(int socket) {
  std::string text;
  std::array<char, 4096> piece;
  while (text.size() < kMaxAnswer) {
    const size_t end = text.find("\r\n\r\n");
    if (end != std::string::npos) {
      const size_t body = end + 4;
      const size_t length = ContentLength(text.substr(0, end));
      if (length > kMaxAnswer) break;
      if (text.size() >= body + length) {
        return std::pair(text.substr(0, end), text.substr(body, length));
      }
    }
    const ssize_t got = ::recv(socket, piece.data(), piece.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return absl::UnavailableError("Firecracker has ended");
    text.append(piece.data(), static_cast<size_t>(got));
  }
  return absl::DataLossError("Firecracker's answer is too long");
}

}  // namespace

ApiRequest PauseRequest() { return {"PATCH", "/vm", {{"state", "Paused"}}}; }
ApiRequest ResumeRequest() { return {"PATCH", "/vm", {{"state", "Resumed"}}}; }

ApiRequest SnapshotRequest(const std::string& directory) {
  return {"PUT",
          "/snapshot/create",
          {{"snapshot_type", "Full"},
           {"snapshot_path", directory + "/" + kSnapshotState},
           {"mem_file_path", directory + "/" + kSnapshotMemory}}};
}

absl::Status SendRequest(const std::string& directory, const ApiRequest& request) {
  const std::string what = fmt::format("Firecracker: {} {}", request.method, request.path);
  ASSIGN_OR_RETURN(const UniqueFd socket, Connect(directory), "{}", what);
  const std::string body = request.body.dump();
  const std::string text = fmt::format(
      "{} {} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
      "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
      request.method, request.path, body.size(), body);
  // Short: it fits into the socket as a whole.
  if (::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(text.size())) {
    return ErrnoStatus(errno, what);
  }
  ASSIGN_OR_RETURN(const auto answer, ReadAnswer(socket.get()), "{}", what);
  const auto& [head, content] = answer;
  // "HTTP/1.1 204 ..."
  if (head.starts_with("HTTP/1.") && head.size() > 12 && head[9] == '2') return absl::OkStatus();
  const json error = json::parse(content, nullptr, /*allow_exceptions=*/false);
  const std::string message = error.is_object() ? error.value("fault_message", content) : content;
  return absl::InternalError(fmt::format("{}: {}", what, message.empty() ? head : message));
}

std::string SerializeRequests(const std::vector<ApiRequest>& requests) {
  json list = json::array();
  for (const ApiRequest& request : requests) {
    list.push_back({{"method", request.method}, {"path", request.path}, {"body", request.body}});
  }
  return list.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<std::vector<ApiRequest>> ParseRequests(std::string_view text) {
  std::vector<ApiRequest> requests;
  try {
    for (const json& entry : json::parse(text)) {
      requests.push_back({entry.at("method").get<std::string>(),
                          entry.at("path").get<std::string>(), entry.at("body")});
    }
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(fmt::format("requests to Firecracker: {}", error.what()));
  }
  return requests;
}

}  // namespace lamina::backends
