// SPDX-License-Identifier: Apache-2.0
//
// From the frames that a start is expected to read to what a Prefetcher does.
#ifndef LAMINA_FS_PREFETCH_PLAN_H_
#define LAMINA_FS_PREFETCH_PLAN_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "chunkstore/blob_store.h"
#include "chunkstore/touch_recorder.h"
#include "fs/image/profile.h"
#include "fs/prefetch/prefetcher.h"

namespace lamina::fs {

// The touches of a profile with `blob` as an index of `blobs`. Whatever is not there, blobs of
// another image or frames past the end, is left out: a profile only says what may be worth fetching.
std::vector<chunkstore::Touch> TouchesIn(
    const Profile& profile, const std::vector<std::shared_ptr<chunkstore::Blob>>& blobs);

// Requests for these frames: those that are wanted about the same time are sorted by their places,
// and joined where less than `gap` compressed bytes lie between them, which are then fetched as well.
// The requests are in the order in which their first frame is wanted.
std::vector<FrameSpan> PlanFor(std::span<const chunkstore::Touch> touches,
                               const std::vector<std::shared_ptr<chunkstore::Blob>>& blobs,
                               uint64_t gap);

// Where a pack holds what `profile` names. kDataLoss if a pack of `size` bytes cannot be one of it.
absl::StatusOr<std::vector<PackContent::Frame>> LayOutPack(
    const Profile& profile, const std::vector<std::shared_ptr<chunkstore::Blob>>& blobs,
    uint64_t size);

}  // namespace lamina::fs

#endif  // LAMINA_FS_PREFETCH_PLAN_H_
