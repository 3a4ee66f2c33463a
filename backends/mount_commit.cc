// SPDX-License-Identifier: Apache-2.0
#include "backends/mount_commit.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backends/group_freeze.h"
#include "fs/engine/messages.h"
#include "fs/mount/overlay.h"

namespace lamina::backends {
namespace {

// The images of a mount as they were when it was made, whatever their tags say now.
absl::StatusOr<std::vector<std::string>> PinnedImages(const fs::MountDescription& mount,
                                                      size_t left_out) {
  std::vector<fs::MountedImage> images{{mount.image, mount.manifest_digest}};
  images.insert(images.end(), mount.layer_images.begin(), mount.layer_images.end());
  std::vector<std::string> references;
  for (size_t i = left_out; i < images.size(); ++i) {
    ASSIGN_OR_RETURN(const Digest manifest, Digest::Parse(images[i].manifest_digest), "{}",
                     images[i].image);
    ASSIGN_OR_RETURN(std::string reference, fs::PinReference(images[i].image, manifest));
    references.push_back(std::move(reference));
  }
  return references;
}

}  // namespace

absl::StatusOr<fs::CommitResult> CommitMount(fs::Client& client,
                                             const MountCommitOptions& options) {
  ASSIGN_OR_RETURN(const nlohmann::json reports, client.Report(options.target));
  if (!reports.is_array() || reports.size() != 1) {
    return absl::InternalError("the engine's report is not understood");
  }
  ASSIGN_OR_RETURN(const fs::MountDescription mount, fs::ParseMountDescription(reports[0]));
  if (mount.upper.empty()) {
    return absl::FailedPreconditionError(
        fmt::format("{} is mounted read-only, so nothing was written there", options.target));
  }
  fs::CommitOptions commit{.upper = mount.upper,
                           .lower_uppers = {mount.lower_uppers.rbegin(), mount.lower_uppers.rend()},
                           .destination = options.destination,
                           .access = {.settings = options.registry},
                           .comment = options.comment,
                           .level = options.level};
  ASSIGN_OR_RETURN(const std::vector<std::string> references,
                   PinnedImages(mount, options.images_left_out));
  ASSIGN_OR_RETURN(commit.images, fs::OpenImages(references, oci::Platform::Host(), commit.access));
  ASSIGN_OR_RETURN(commit.user_xattrs, fs::OverlayNeedsUserXattr());

  std::optional<GroupFreeze> freeze;
  if (options.pause) {
    ASSIGN_OR_RETURN(std::vector<Cgroup> groups, GroupsOnMount(options.target));
    if (!groups.empty()) {
      freeze.emplace(std::move(groups));
      commit.pause = [&freeze] { return freeze->Begin(); };
      commit.resume = [&freeze] { freeze->End(); };
    }
  }
  return fs::Commit(commit);
}

}  // namespace lamina::backends
