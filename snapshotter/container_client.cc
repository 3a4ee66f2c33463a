// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/container_client.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include "snapshotter/containerd_call.h"
#include "snapshotter/containers.grpc.pb.h"
#include "snapshotter/images.grpc.pb.h"

namespace lamina::snapshotter {
namespace {

using containerd::services::containers::v1::Containers;
using containerd::services::containers::v1::GetContainerRequest;
using containerd::services::containers::v1::GetContainerResponse;
using containerd::services::images::v1::GetImageRequest;
using containerd::services::images::v1::GetImageResponse;
using containerd::services::images::v1::Images;

class GrpcContainerClient final : public ContainerClient {
 public:
  explicit GrpcContainerClient(const std::string& socket)
      : name_("containerd at " + socket),
        channel_(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials())),
        containers_(Containers::NewStub(channel_)),
        images_(Images::NewStub(channel_)) {}

  absl::StatusOr<ContainerInfo> Get(const std::string& name_space, const std::string& id) override {
    GetContainerRequest request;
    request.set_id(id);
    GetContainerResponse response;
    {
      grpc::ClientContext context;
      PrepareCall(name_space, context);
      RETURN_IF_ERROR(FromContainerd(containers_->Get(&context, request, &response), name_));
    }
    ContainerInfo info{.snapshotter = response.container().snapshotter(),
                       .snapshot_key = response.container().snapshot_key(),
                       .image = response.container().image()};
    GetImageRequest image_request;
    image_request.set_name(info.image);
    GetImageResponse image_response;
    {
      grpc::ClientContext context;
      PrepareCall(name_space, context);
      RETURN_IF_ERROR(
          FromContainerd(images_->Get(&context, image_request, &image_response), name_));
    }
    ASSIGN_OR_RETURN(info.image_digest, Digest::Parse(image_response.image().target().digest()),
                     "{}: image {}", name_, info.image);
    return info;
  }

 private:
  const std::string name_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<Containers::Stub> containers_;
  const std::unique_ptr<Images::Stub> images_;
};

}  // namespace

std::unique_ptr<ContainerClient> ContainerClient::Create(const std::string& socket) {
  return std::make_unique<GrpcContainerClient>(socket);
}

}  // namespace lamina::snapshotter
