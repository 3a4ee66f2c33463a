// SPDX-License-Identifier: Apache-2.0
#include "fs/control/grpc_server.h"

#include <fcntl.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>

#include <utility>

#include "fs/control/acceptor.h"

namespace lamina::fs {
namespace {

// How long calls may go on once the daemon ends, as a mount from an origin that is slow.
constexpr std::chrono::seconds kFinishFor{5};

// Accepts by itself, because gRPC would make a socket that anyone may connect to until its mode is
// set, and cannot take one that is there.
class AcceptingGrpcServer final : public GrpcServer {
 public:
  AcceptingGrpcServer(std::unique_ptr<grpc::Service> service, UniqueFd listener)
      : service_(std::move(service)),
        acceptor_(std::move(listener), [this](UniqueFd socket) { Serve(std::move(socket)); }) {}
  ~AcceptingGrpcServer() override {
    acceptor_.Stop();
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + kFinishFor);
  }

  absl::Status Run(const std::string& name) {
    grpc::ServerBuilder builder;
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return absl::InternalError("gRPC server does not start");
    return acceptor_.Start(name);
  }

 private:
  void Serve(UniqueFd socket) {
    ::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
    grpc::AddInsecureChannelFromFd(server_.get(), socket.Release());
  }

  const std::unique_ptr<grpc::Service> service_;  // of server_
  std::unique_ptr<grpc::Server> server_;
  Acceptor acceptor_;
};

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.raw_code()), std::string(status.message())};
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    std::unique_ptr<grpc::Service> service, UniqueFd listener, const std::string& name) {
  auto server = std::make_unique<AcceptingGrpcServer>(std::move(service), std::move(listener));
  RETURN_IF_ERROR(server->Run(name));
  return server;
}

}  // namespace lamina::fs
