// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/start_plan.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "fs/image/profile_artifact.h"
#include "fs/prefetch/image_prefetch.h"

namespace lamina::fs {

void StartPlan::Make(const std::stop_token& stop, Prefetcher::Work& work) {
  const absl::StatusOr<AttachedProfile> profile = FindProfile(image_);
  if (!profile.ok() && !absl::IsNotFound(profile.status())) {
    spdlog::warn("{}: its profile is not used: {}", image_.reference,
                 std::string(profile.status().message()));
  }
  const bool is_laid_out = std::ranges::any_of(
      image_.manifest.layers, [](const oci::Descriptor& layer) { return layer.HotFrames() > 0; });
  std::shared_ptr<const MergedMetadata> metadata;
  {
    std::unique_lock lock(mutex_);
    has_profile_plan_ = !profile.ok() && !is_laid_out;
    changed_.notify_all();
    if (!changed_.wait(lock, stop, [this] { return metadata_ != nullptr; })) return;
    work.blobs = std::exchange(blobs_, {});
    metadata = std::exchange(metadata_, nullptr);
  }
  if (profile.ok()) {
    PlanFromProfile(image_, *profile, work);
  } else if (!PlanFromLayout(image_, work)) {
    PlanFromEntrypoint(image_, metadata->mapping.bytes(), stop, work);
  }
  std::lock_guard lock(mutex_);
  has_profile_plan_ = true;
  changed_.notify_all();
}

void StartPlan::Attached(std::vector<std::shared_ptr<chunkstore::Blob>> blobs,
                         std::shared_ptr<const MergedMetadata> metadata) {
  std::lock_guard lock(mutex_);
  blobs_ = std::move(blobs);
  metadata_ = std::move(metadata);
  changed_.notify_all();
}

void StartPlan::AwaitProfile(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [this] { return has_profile_plan_; });
}

}  // namespace lamina::fs
