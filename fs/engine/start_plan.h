// SPDX-License-Identifier: Apache-2.0
//
// What is prefetched for a start, found out while the image is being mounted: the profile is looked for
// at the same time as the layers' tables are read, so that its frames are under way before the first
// program reads.
#ifndef LAMINA_FS_ENGINE_START_PLAN_H_
#define LAMINA_FS_ENGINE_START_PLAN_H_

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stop_token>
#include <vector>

#include "chunkstore/blob_store.h"
#include "fs/engine/metadata_cache.h"
#include "fs/image/image.h"
#include "fs/prefetch/prefetcher.h"

namespace lamina::fs {

// Shared by who mounts and by the prefetcher's thread that plans.
class StartPlan {
 public:
  explicit StartPlan(Image image) : image_(std::move(image)) {}

  // By the prefetcher (Prefetcher::Start). Waits for the origin and for Attached().
  void Make(const std::stop_token& stop, Prefetcher::Work& work);

  // By who mounts: what the plan is for.
  void Attached(std::vector<std::shared_ptr<chunkstore::Blob>> blobs,
                std::shared_ptr<const MergedMetadata> metadata);
  // Waits until it is known what the image's profile, or its layout, says, or that it has neither; not
  // longer than `patience`. A start that is a little later needs far fewer requests then.
  void AwaitProfile(std::chrono::milliseconds patience);

 private:
  const Image image_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable_any changed_;
  bool has_profile_plan_ = false;  // or one from the layout, or will have neither
  std::vector<std::shared_ptr<chunkstore::Blob>> blobs_;
  std::shared_ptr<const MergedMetadata> metadata_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_START_PLAN_H_
