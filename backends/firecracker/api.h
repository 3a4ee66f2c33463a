// SPDX-License-Identifier: Apache-2.0
//
// Firecracker's API: what is asked of it, and how (HTTP on a unix socket).
#ifndef LAMINA_BACKENDS_FIRECRACKER_API_H_
#define LAMINA_BACKENDS_FIRECRACKER_API_H_

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::backends {

struct ApiRequest {
  std::string method;
  std::string path;
  nlohmann::json body;
};

// Names in the sandbox's directory, which is Firecracker's working directory: a snapshot has paths in it,
// and so it can be started in another directory.
inline constexpr const char* kFirecrackerApi = "api.sock";
inline constexpr const char* kFirecrackerVsock = "vsock.sock";
inline constexpr const char* kSnapshotState = "state";
// Where the agent listens in the guest.
inline constexpr unsigned kAgentVsockPort = 1024;

ApiRequest PauseRequest();
ApiRequest ResumeRequest();
// Of a paused machine, into a directory.
ApiRequest SnapshotRequest(const std::string& directory);

// Sends a request and waits for its answer. Errors have Firecracker's own message.
absl::Status SendRequest(const std::string& directory, const ApiRequest& request);

// Requests as text, and back: the launcher has planned them, the monitor sends them.
std::string SerializeRequests(const std::vector<ApiRequest>& requests);
absl::StatusOr<std::vector<ApiRequest>> ParseRequests(std::string_view text);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_FIRECRACKER_API_H_
