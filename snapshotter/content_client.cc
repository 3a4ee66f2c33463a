// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/content_client.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"
#include "snapshotter/containerd_call.h"
#include "snapshotter/content.grpc.pb.h"

namespace lamina::snapshotter {
namespace {

namespace content = containerd::services::content::v1;

class GrpcContentClient final : public ContentClient {
 public:
  explicit GrpcContentClient(const std::string& socket)
      : name_("containerd at " + socket),
        stub_(content::Content::NewStub(
            grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()))) {}

  absl::StatusOr<std::vector<ContentInfo>> List(const std::string& name_space,
                                                const std::vector<std::string>& filters) override {
    grpc::ClientContext context;
    PrepareCall(name_space, context);
    content::ListContentRequest request;
    for (const std::string& filter : filters) request.add_filters(filter);
    const auto reader = stub_->List(&context, request);
    std::vector<ContentInfo> infos;
    content::ListContentResponse response;
    while (reader->Read(&response)) {
      for (const content::Info& info : response.info()) {
        const absl::StatusOr<Digest> digest = Digest::Parse(info.digest());
        if (!digest.ok()) continue;
        infos.push_back({*digest, {info.labels().begin(), info.labels().end()}});
      }
    }
    RETURN_IF_ERROR(FromContainerd(reader->Finish(), name_));
    return infos;
  }

  absl::StatusOr<std::string> Read(const std::string& name_space, const Digest& digest) override {
    grpc::ClientContext context;
    PrepareCall(name_space, context);
    content::ReadContentRequest request;
    request.set_digest(digest.ToString());
    const auto reader = stub_->Read(&context, request);
    std::string content;
    content::ReadContentResponse response;
    while (reader->Read(&response)) {
      content += response.data();
      if (content.size() > oci::kMaxDocumentSize) {
        context.TryCancel();
        return absl::ResourceExhaustedError(
            fmt::format("{}: {} is too large for a document", name_, digest.ToString()));
      }
    }
    RETURN_IF_ERROR(FromContainerd(reader->Finish(), name_), "{}", digest.ToString());
    if (Digest::Of(AsBytes(content)) != digest) {
      return absl::DataLossError(
          fmt::format("{}: the content of {} has another digest", name_, digest.ToString()));
    }
    return content;
  }

 private:
  const std::string name_;
  const std::unique_ptr<content::Content::Stub> stub_;
};

}  // namespace

std::unique_ptr<ContentClient> ContentClient::Create(const std::string& socket) {
  return std::make_unique<GrpcContentClient>(socket);
}

}  // namespace lamina::snapshotter
