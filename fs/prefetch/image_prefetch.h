// SPDX-License-Identifier: Apache-2.0
//
// What to prefetch for an image that is mounted or being fetched: its profile; if it has none, what it
// was laid out for; if that is nothing either, what its start will probably read.
#ifndef LAMINA_FS_PREFETCH_IMAGE_PREFETCH_H_
#define LAMINA_FS_PREFETCH_IMAGE_PREFETCH_H_

#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "chunkstore/blob_store.h"
#include "fs/image/image.h"
#include "fs/image/profile_artifact.h"
#include "fs/prefetch/prefetcher.h"

namespace lamina::fs {

// Sets plan and pack of `work`, whose blobs are the image's layers, from the image's profile, or the plan
// from its layout. kNotFound if it has neither. May wait for the origin.
absl::Status PlanFromProfile(const Image& image, Prefetcher::Work& work);
// The same with a profile that was found.
void PlanFromProfile(const Image& image, const AttachedProfile& attached, Prefetcher::Work& work);

// Sets the plan of `work` to the frames that convert --profile has put first, if there are any. Returns
// whether there are.
bool PlanFromLayout(const Image& image, Prefetcher::Work& work);

// Sets the plan of `work` from the program that the image starts. `metadata` are those of the merged
// image. May wait for the origin.
void PlanFromEntrypoint(const Image& image, std::span<const std::byte> metadata,
                        const std::stop_token& stop, Prefetcher::Work& work);

}  // namespace lamina::fs

#endif  // LAMINA_FS_PREFETCH_IMAGE_PREFETCH_H_
