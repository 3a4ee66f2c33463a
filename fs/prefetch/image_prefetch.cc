// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/image_prefetch.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "erofs/reader.h"
#include "fs/image/profile_artifact.h"
#include "fs/prefetch/plan.h"
#include "fs/prefetch/startup_order.h"

namespace lamina::fs {
namespace {

// Bytes between wanted frames that are fetched as well rather than making two requests: for origins
// to which a request is dear, what a link of 200 Mbit/s moves in the 20 ms that one costs.
constexpr uint64_t kGap = 512 << 10;

uint64_t GapFor(const Image& image) {
  return image.origin->preferred_request_size() > 0 ? kGap : 0;
}

}  // namespace

absl::Status PlanFromProfile(const Image& image, Prefetcher::Work& work) {
  ASSIGN_OR_RETURN(const AttachedProfile attached, FindProfile(image));
  work.plan = PlanFor(TouchesIn(attached.profile, work.blobs), work.blobs, GapFor(image));
  if (!attached.pack) return absl::OkStatus();
  // Without its pack a profile is still of use.
  absl::StatusOr<std::vector<PackContent::Frame>> frames =
      LayOutPack(attached.profile, work.blobs, attached.pack->size);
  absl::Status status = frames.status();
  if (frames.ok()) {
    absl::StatusOr<std::unique_ptr<chunkstore::OriginObject>> object =
        image.origin->Open(attached.pack->digest, attached.pack->size);
    status = object.status();
    if (object.ok()) work.pack = {.object = *std::move(object), .frames = *std::move(frames)};
  }
  if (!status.ok()) {
    spdlog::warn("{}: pack {} is not used: {}", image.reference, attached.pack->digest.ToString(),
                 std::string(status.message()));
  }
  return absl::OkStatus();
}

void PlanFromEntrypoint(const Image& image, std::span<const std::byte> metadata,
                        const std::stop_token& stop, Prefetcher::Work& work) {
  const absl::StatusOr<erofs::Reader> reader = erofs::Reader::Open(metadata);
  if (!reader.ok() || reader->devices().size() != work.blobs.size()) return;
  const std::vector<chunkstore::Touch> touches =
      StartupOrder(*reader, work.blobs, image.config, work.stats, stop);
  work.plan = PlanFor(touches, work.blobs, GapFor(image));
}

void PlanStart(const Image& image, std::span<const std::byte> metadata, const std::stop_token& stop,
               Prefetcher::Work& work) {
  const absl::Status status = PlanFromProfile(image, work);
  if (status.ok()) return;
  if (!absl::IsNotFound(status)) {
    spdlog::warn("{}: its profile is not used: {}", image.reference, std::string(status.message()));
  }
  PlanFromEntrypoint(image, metadata, stop, work);
}

}  // namespace lamina::fs
