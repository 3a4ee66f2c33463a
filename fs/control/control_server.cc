// SPDX-License-Identifier: Apache-2.0
#include "fs/control/control_server.h"

#include <utility>

#include "fs/control/control.grpc.pb.h"

namespace lamina::fs {
namespace {

absl::StatusOr<Transport> FromProto(control::v1::Transport transport) {
  switch (transport) {
    case control::v1::TRANSPORT_AUTO:
      return Transport::kAuto;
    case control::v1::TRANSPORT_EROFS:
      return Transport::kErofs;
    case control::v1::TRANSPORT_FUSE:
      return Transport::kFuse;
    default:
      return absl::InvalidArgumentError(
          fmt::format("transport {} is not known", static_cast<int>(transport)));
  }
}

control::v1::Transport ToProto(Transport transport) {
  switch (transport) {
    case Transport::kErofs:
      return control::v1::TRANSPORT_EROFS;
    case Transport::kFuse:
      return control::v1::TRANSPORT_FUSE;
    case Transport::kAuto:
      break;
  }
  return control::v1::TRANSPORT_AUTO;
}

void Fill(const MountDescription& mount, control::v1::MountDescription& message) {
  message.set_id(mount.id);
  message.set_image(mount.image);
  message.set_manifest_digest(mount.manifest_digest);
  message.set_target(mount.target);
  message.set_transport(ToProto(mount.transport));
  message.set_loop(mount.loop);
  message.set_writable(mount.writable);
  message.set_reason(mount.reason);
}

void Fill(const chunkstore::LatencyHistogram& latency, control::v1::Latency& message) {
  const auto quantile = [&latency](double fraction) {
    return static_cast<uint64_t>(latency.Quantile(fraction).count());
  };
  message.set_count(latency.count());
  message.set_p50(quantile(0.50));
  message.set_p95(quantile(0.95));
  message.set_p99(quantile(0.99));
}

void Fill(const MountReport& report, control::v1::MountReport& message) {
  const chunkstore::ReadStats& stats = *report.stats;
  Fill(report.mount, *message.mutable_mount());
  message.set_layers(report.layers);
  message.set_frames(report.frames);
  message.set_frames_present(report.frames_present);
  message.set_sharing(report.sharing);
  message.set_read_requests(stats.read_requests);
  message.set_read_bytes(stats.read_bytes);
  message.set_missed_requests(stats.missed_requests);
  message.set_failed_requests(stats.failed_requests);
  message.set_origin_requests(stats.origin_requests);
  message.set_fetched_bytes(stats.fetched_bytes);
  message.set_fetched_frames(stats.fetched_frames);
  message.set_copied_frames(stats.copied_frames);
  message.set_decompressed_bytes(stats.decompressed_bytes);
  message.set_written_bytes(stats.written_bytes);
  Fill(stats.hit_latency, *message.mutable_hit_latency());
  Fill(stats.miss_latency, *message.mutable_miss_latency());
}

class MountsService final : public control::v1::Mounts::Service {
 public:
  explicit MountsService(Engine& engine) : engine_(engine) {}

  grpc::Status Mount(grpc::ServerContext*, const control::v1::MountRequest* request,
                     control::v1::MountResponse* response) override {
    const auto transport = FromProto(request->transport());
    if (!transport.ok()) return ToGrpc(transport.status());
    const auto mount = engine_.Mount({.image = request->image(),
                                      .target = request->target(),
                                      .transport = *transport,
                                      .loop = request->loop(),
                                      .writable = request->writable(),
                                      .writable_dir = request->writable_dir(),
                                      .token = request->token()});
    if (!mount.ok()) return ToGrpc(mount.status());
    Fill(*mount, *response->mutable_mount());
    return grpc::Status::OK;
  }

  grpc::Status Unmount(grpc::ServerContext*, const control::v1::UnmountRequest* request,
                       control::v1::UnmountResponse*) override {
    return ToGrpc(engine_.Unmount(request->target()));
  }

  grpc::Status Report(grpc::ServerContext*, const control::v1::ReportRequest* request,
                      control::v1::ReportResponse* response) override {
    std::optional<std::string> target;
    if (!request->target().empty()) target = request->target();
    const auto reports = engine_.Report(target);
    if (!reports.ok()) return ToGrpc(reports.status());
    for (const MountReport& report : *reports) Fill(report, *response->add_mounts());
    return grpc::Status::OK;
  }

 private:
  Engine& engine_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> StartControlServer(Engine& engine, UniqueFd listener) {
  return GrpcServer::Start(std::make_unique<MountsService>(engine), std::move(listener),
                           "gRPC socket");
}

}  // namespace lamina::fs
