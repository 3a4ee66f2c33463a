// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/image_prefetch.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "erofs/reader.h"
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

absl::StatusOr<PackContent> OpenPack(const Image& image, const AttachedProfile& attached,
                                     const Prefetcher::Work& work) {
  PackContent pack;
  ASSIGN_OR_RETURN(pack.frames, LayOutPack(attached.profile, work.blobs, attached.pack->size));
  ASSIGN_OR_RETURN(pack.object, image.origin->Open(attached.pack->digest, attached.pack->size));
  return pack;
}

}  // namespace

absl::Status PlanFromProfile(const Image& image, Prefetcher::Work& work) {
  const absl::StatusOr<AttachedProfile> attached = FindProfile(image);
  if (attached.ok()) {
    PlanFromProfile(image, *attached, work);
    return absl::OkStatus();
  }
  if (!PlanFromLayout(image, work)) return attached.status();
  if (!absl::IsNotFound(attached.status())) {
    spdlog::warn("{}: its layout is followed, not its profile: {}", image.reference,
                 std::string(attached.status().message()));
  }
  return absl::OkStatus();
}

void PlanFromProfile(const Image& image, const AttachedProfile& attached, Prefetcher::Work& work) {
  if (attached.pack) {
    absl::StatusOr<PackContent> pack = OpenPack(image, attached, work);
    if (pack.ok()) {
      work.pack = *std::move(pack);
    } else {  // without it a profile is still of use
      spdlog::warn("{}: pack {} is not used: {}", image.reference, attached.pack->digest.ToString(),
                   std::string(pack.status().message()));
    }
  }
  // What lies between the frames of a pack is not in it, and saves no request behind it.
  const uint64_t gap = work.pack.object != nullptr ? 0 : GapFor(image);
  work.plan = PlanFor(TouchesIn(attached.profile, work.blobs), work.blobs, gap);
}

bool PlanFromLayout(const Image& image, Prefetcher::Work& work) {
  work.plan.clear();
  for (const oci::Descriptor& layer : image.manifest.layers) {
    for (uint32_t i = 0; i < work.blobs.size(); ++i) {
      if (work.blobs[i]->descriptor().digest != layer.digest) continue;
      const uint32_t frames = std::min(layer.HotFrames(), work.blobs[i]->frames().size());
      if (frames > 0) work.plan.push_back({.blob = i, .first = 0, .end = frames});
    }
  }
  return !work.plan.empty();
}

void PlanFromEntrypoint(const Image& image, std::span<const std::byte> metadata,
                        const std::stop_token& stop, Prefetcher::Work& work) {
  const absl::StatusOr<erofs::Reader> reader = erofs::Reader::Open(metadata);
  if (!reader.ok() || reader->devices().size() != work.blobs.size()) return;
  const StartupFrames frames = StartupOrder(*reader, work.blobs, image.config, work.stats, stop);
  work.plan = PlanFor(frames.opened, work.blobs, GapFor(image));
  std::ranges::copy(PlanFor(frames.neighbours, work.blobs, 0), std::back_inserter(work.plan));
}

}  // namespace lamina::fs
