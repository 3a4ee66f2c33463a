// SPDX-License-Identifier: Apache-2.0
//
// A profile: which frames of an image a command touched, in the order of the first touch. A start
// that follows it fetches what it will need before it is asked for. The text form (PROFILE.md) comes
// from outside like every other document: parsing checks all that can be checked without the blobs.
#ifndef LAMINA_FS_IMAGE_PROFILE_H_
#define LAMINA_FS_IMAGE_PROFILE_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"
#include "chunkstore/blob_store.h"
#include "chunkstore/touch_recorder.h"

namespace lamina::fs {

inline constexpr std::string_view kProfileType = "application/vnd.lamina.profile.v1+json";

struct Profile {
  struct Blob {
    Digest digest;
    // Names content and order of the blob's chunks, whatever they are compressed with: the tag of
    // the device in the layer's metadata (chunkstore/FORMAT.md). Needed for convert --profile only.
    std::optional<Digest> content;
    bool operator==(const Blob&) const = default;
  };

  std::optional<Digest> image;  // manifest of the image it was recorded on
  std::vector<Blob> blobs;      // layers, lowest first, each once
  // By ascending times; `blob` is an index of `blobs`, and no frame is there twice.
  std::vector<chunkstore::Touch> touches;
  bool operator==(const Profile&) const = default;

  static absl::StatusOr<Profile> Parse(std::string_view json);
  // Canonical: equal profiles give equal bytes, and no more than Parse accepts.
  std::string ToJson() const;
};

// A profile of touches that were recorded on `blobs`, the layers of `image`, lowest first.
Profile MakeProfile(const Digest& image,
                    const std::vector<std::shared_ptr<chunkstore::Blob>>& blobs,
                    const std::vector<chunkstore::Touch>& touches);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_PROFILE_H_
