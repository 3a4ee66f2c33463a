// SPDX-License-Identifier: Apache-2.0
//
// A profile that is stored with its image: an OCI artifact whose `subject` is the image's manifest.
// Its first layer is the profile; a second one, if there is one, is a pack: the frames that the
// profile names, as they are in their blobs, in the profile's order, one behind the other. So the
// profile and the blobs' frame tables tell what is where in a pack, and check it.
#ifndef LAMINA_FS_IMAGE_PROFILE_ARTIFACT_H_
#define LAMINA_FS_IMAGE_PROFILE_ARTIFACT_H_

#include <optional>
#include <string>
#include <vector>

#include "fs/image/image.h"
#include "fs/image/profile.h"

namespace lamina::fs {

inline constexpr std::string_view kPackType = "application/vnd.lamina.pack.v1";

struct AttachedProfile {
  Digest manifest_digest;
  std::string created;  // RFC 3339, or empty
  Digest profile_digest;
  Profile profile;
  std::optional<oci::Descriptor> pack;
};

// The profile that was attached to the image last; kNotFound if there is none.
absl::StatusOr<AttachedProfile> FindProfile(const Image& image);
// All of them, oldest first; in place of one that cannot be read an error that names it.
absl::StatusOr<std::vector<absl::StatusOr<AttachedProfile>>> ListProfiles(const Image& image);

// Stores a profile with the image, and with a pack if so asked; in a layout in place of the one that
// is attached to it. kInvalidArgument if the profile names a blob that is no layer of the image, or a frame that
// its blob does not have.
absl::StatusOr<AttachedProfile> AttachProfile(const Image& image, const Profile& profile,
                                              bool with_pack, const RegistryAccess& access = {});

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_PROFILE_ARTIFACT_H_
