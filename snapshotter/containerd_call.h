// SPDX-License-Identifier: Apache-2.0
//
// What all calls of containerd have in common.
#ifndef LAMINA_SNAPSHOTTER_CONTAINERD_CALL_H_
#define LAMINA_SNAPSHOTTER_CONTAINERD_CALL_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <string>

#include "chunkstore/base/status.h"

namespace lamina::snapshotter {

inline void PrepareCall(const std::string& name_space, grpc::ClientContext& context) {
  // containerd answers from its own disk.
  constexpr std::chrono::seconds kPatience{10};
  context.AddMetadata("containerd-namespace", name_space);
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
}

// absl and gRPC have the same codes. `name` is containerd's in errors.
inline absl::Status FromContainerd(const grpc::Status& status, const std::string& name) {
  if (status.ok()) return absl::OkStatus();
  return {static_cast<absl::StatusCode>(status.error_code()),
          fmt::format("{}: {}", name, status.error_message())};
}

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_CONTAINERD_CALL_H_
