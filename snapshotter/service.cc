// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "snapshotter/filter.h"
#include "snapshotter/snapshots.grpc.pb.h"

namespace lamina::snapshotter {
namespace {

namespace api = containerd::services::snapshots::v1;
using fs::ToGrpc;
using google::protobuf::Empty;

constexpr int64_t kSecond = 1'000'000'000;
// In one message of List.
constexpr int kListed = 100;

api::Kind ToProto(Kind kind) {
  switch (kind) {
    case Kind::kView:
      return api::VIEW;
    case Kind::kActive:
      return api::ACTIVE;
    case Kind::kCommitted:
      return api::COMMITTED;
  }
  return api::UNKNOWN;
}

void SetTime(int64_t nanoseconds, google::protobuf::Timestamp& time) {
  time.set_seconds(nanoseconds / kSecond);
  time.set_nanos(static_cast<int32_t>(nanoseconds % kSecond));
}

void Fill(const Snapshot& snapshot, api::Info& info) {
  info.set_name(snapshot.name);
  info.set_parent(snapshot.parent);
  info.set_kind(ToProto(snapshot.kind));
  SetTime(snapshot.created, *info.mutable_created_at());
  SetTime(snapshot.updated, *info.mutable_updated_at());
  info.mutable_labels()->insert(snapshot.labels.begin(), snapshot.labels.end());
}

template <typename Response>
void Fill(const std::vector<MountSpec>& mounts, Response& response) {
  for (const MountSpec& mount : mounts) {
    api::Mount& message = *response.add_mounts();
    message.set_type(mount.type);
    message.set_source(mount.source);
    for (const std::string& option : mount.options) message.add_options(option);
  }
}

// Whether it is the snapshot that Prepare has said exists that containerd looks for (metadata/snapshot.go).
bool LooksForTaken(const api::ListSnapshotsRequest& request) {
  return std::ranges::any_of(request.filters(), [](const std::string& filter) {
    return filter.find(kReferenceLabel) != std::string::npos;
  });
}

Labels ToLabels(const google::protobuf::Map<std::string, std::string>& labels) {
  return {labels.begin(), labels.end()};
}

// What a client cannot be blamed for is in the log as well: it may not show the text.
grpc::Status Answer(const absl::Status& status, const char* operation) {
  if (!status.ok() && !absl::IsNotFound(status) && !absl::IsAlreadyExists(status) &&
      !absl::IsInvalidArgument(status) && !absl::IsFailedPrecondition(status)) {
    spdlog::error("{}: {}", operation, std::string(status.message()));
  }
  return ToGrpc(status);
}

class Service final : public api::Snapshots::Service {
 public:
  explicit Service(std::shared_ptr<Snapshotter> snapshotter)
      : snapshotter_(std::move(snapshotter)) {}

  grpc::Status Prepare(grpc::ServerContext*, const api::PrepareSnapshotRequest* request,
                       api::PrepareSnapshotResponse* response) override {
    return Create(Kind::kActive, *request, *response, "prepare");
  }

  grpc::Status View(grpc::ServerContext*, const api::ViewSnapshotRequest* request,
                    api::ViewSnapshotResponse* response) override {
    return Create(Kind::kView, *request, *response, "view");
  }

  grpc::Status Mounts(grpc::ServerContext*, const api::MountsRequest* request,
                      api::MountsResponse* response) override {
    const auto mounts = snapshotter_->Mounts(request->key());
    if (mounts.ok()) Fill(*mounts, *response);
    return Answer(mounts.status(), "mounts");
  }

  grpc::Status Commit(grpc::ServerContext*, const api::CommitSnapshotRequest* request,
                      Empty*) override {
    return Answer(
        snapshotter_->Commit(request->name(), request->key(), ToLabels(request->labels())),
        "commit");
  }

  grpc::Status Remove(grpc::ServerContext*, const api::RemoveSnapshotRequest* request,
                      Empty*) override {
    return Answer(snapshotter_->Remove(request->key()), "remove");
  }

  grpc::Status Stat(grpc::ServerContext*, const api::StatSnapshotRequest* request,
                    api::StatSnapshotResponse* response) override {
    const auto snapshot = snapshotter_->Stat(request->key());
    if (snapshot.ok()) Fill(*snapshot, *response->mutable_info());
    return Answer(snapshot.status(), "stat");
  }

  grpc::Status Update(grpc::ServerContext*, const api::UpdateSnapshotRequest* request,
                      api::UpdateSnapshotResponse* response) override {
    const auto& paths = request->update_mask().paths();
    const auto snapshot = snapshotter_->Update(
        request->info().name(), ToLabels(request->info().labels()), {paths.begin(), paths.end()});
    if (snapshot.ok()) Fill(*snapshot, *response->mutable_info());
    return Answer(snapshot.status(), "update");
  }

  grpc::Status List(grpc::ServerContext*, const api::ListSnapshotsRequest* request,
                    grpc::ServerWriter<api::ListSnapshotsResponse>* writer) override {
    const auto filter = Filter::Parse({request->filters().begin(), request->filters().end()});
    if (!filter.ok()) return ToGrpc(filter.status());
    const auto matches = [&](const Snapshot& snapshot) { return filter->Matches(snapshot); };
    // It takes the first one that has the chain id, which others may have for other content.
    const std::vector<Snapshot> snapshots =
        LooksForTaken(*request) ? snapshotter_->ListTaken(matches) : snapshotter_->List();
    api::ListSnapshotsResponse response;
    for (const Snapshot& snapshot : snapshots) {
      if (!matches(snapshot)) continue;
      Fill(snapshot, *response.add_info());
      if (response.info_size() < kListed) continue;
      if (!writer->Write(response)) return grpc::Status::CANCELLED;
      response.Clear();
    }
    if (response.info_size() > 0 && !writer->Write(response)) return grpc::Status::CANCELLED;
    return grpc::Status::OK;
  }

  grpc::Status Usage(grpc::ServerContext*, const api::UsageRequest* request,
                     api::UsageResponse* response) override {
    const auto usage = snapshotter_->GetUsage(request->key());
    if (usage.ok()) {
      response->set_size(usage->bytes);
      response->set_inodes(usage->inodes);
    }
    return Answer(usage.status(), "usage");
  }

  grpc::Status Cleanup(grpc::ServerContext*, const api::CleanupRequest*, Empty*) override {
    snapshotter_->Cleanup();
    return grpc::Status::OK;
  }

 private:
  template <typename Request, typename Response>
  grpc::Status Create(Kind kind, const Request& request, Response& response,
                      const char* operation) {
    const auto mounts =
        snapshotter_->Create(kind, request.key(), request.parent(), ToLabels(request.labels()));
    if (mounts.ok()) Fill(*mounts, response);
    return Answer(mounts.status(), operation);
  }

  const std::shared_ptr<Snapshotter> snapshotter_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<fs::GrpcServer>> StartSnapshotService(
    std::shared_ptr<Snapshotter> snapshotter, UniqueFd listener) {
  return fs::GrpcServer::Start(std::make_unique<Service>(std::move(snapshotter)),
                               std::move(listener), "snapshotter socket");
}

}  // namespace lamina::snapshotter
