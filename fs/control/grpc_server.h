// SPDX-License-Identifier: Apache-2.0
//
// What services over gRPC on a unix socket have in common.
#ifndef LAMINA_FS_CONTROL_GRPC_SERVER_H_
#define LAMINA_FS_CONTROL_GRPC_SERVER_H_

#include <grpcpp/support/status.h>

#include <memory>
#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace grpc {
class Service;
}

namespace lamina::fs {

// absl and gRPC have the same codes.
grpc::Status ToGrpc(const absl::Status& status);

class GrpcServer {
 public:
  // Accepts connections from `listener`, a listening unix socket: who may connect is decided by its
  // owner. Calls come on threads of gRPC's. `name` is the socket's in the log.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(std::unique_ptr<grpc::Service> service,
                                                           UniqueFd listener,
                                                           const std::string& name);
  // Lets calls that run finish, for a few seconds.
  virtual ~GrpcServer() = default;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_CONTROL_GRPC_SERVER_H_
