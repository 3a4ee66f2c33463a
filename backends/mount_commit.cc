// SPDX-License-Identifier: Apache-2.0
#include "backends/mount_commit.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backends/group_freeze.h"
#include "chunkstore/base/json.h"
#include "fs/engine/messages.h"
#include "fs/mount/mount.h"
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

// What is mounted, and what a commit of it needs to know.
struct Written {
  std::string upper;
  std::vector<std::string> lower_uppers;  // lowest first
  std::string mount_point;                // empty: nothing runs on it
};

absl::StatusOr<fs::CommitResult> CommitWritten(const Written& written,
                                               std::vector<fs::Image> images,
                                               const WrittenCommitOptions& options) {
  fs::CommitOptions commit{.images = std::move(images),
                           .upper = written.upper,
                           .lower_uppers = written.lower_uppers,
                           .destination = options.destination,
                           .access = {.settings = options.registry},
                           .comment = options.comment,
                           .level = options.level};
  ASSIGN_OR_RETURN(commit.user_xattrs, fs::OverlayNeedsUserXattr());
  std::optional<GroupFreeze> freeze;
  if (options.pause && !written.mount_point.empty()) {
    ASSIGN_OR_RETURN(std::vector<Cgroup> groups, GroupsOnMount(written.mount_point));
    if (!groups.empty()) {
      freeze.emplace(std::move(groups));
      commit.pause = [&freeze] { return freeze->Begin(); };
      commit.resume = [&freeze] { freeze->End(); };
    }
  }
  return fs::Commit(commit);
}

absl::StatusOr<std::vector<fs::Image>> Open(const std::vector<std::string>& references,
                                            const WrittenCommitOptions& options) {
  std::vector<std::string> all = references;
  all.push_back(options.destination);
  RETURN_IF_ERROR(fs::CheckCredentials(all, options.registry));
  return fs::OpenImages(references, oci::Platform::Host(), {.settings = options.registry});
}

// Where an overlay with this upper directory is mounted; empty if it is not.
absl::StatusOr<std::string> MountPointOf(const std::string& upper) {
  ASSIGN_OR_RETURN(const std::vector<fs::MountInfo> mounts, fs::ReadMountInfo());
  const std::string option = fmt::format(",upperdir={},", upper);
  for (const fs::MountInfo& mount : mounts) {
    if (mount.type != "overlay") continue;
    if (fmt::format(",{},", mount.super_options).find(option) != std::string::npos) {
      return mount.target;
    }
  }
  return "";
}

}  // namespace

absl::StatusOr<fs::CommitResult> CommitMount(fs::Client& client, const std::string& mount_point,
                                             const WrittenCommitOptions& options) {
  ASSIGN_OR_RETURN(const nlohmann::json reports, client.Report(mount_point));
  if (!reports.is_array() || reports.size() != 1) {
    return absl::InternalError("the engine's report is not understood");
  }
  ASSIGN_OR_RETURN(const fs::MountDescription mount, fs::ParseMountDescription(reports[0]));
  if (mount.upper.empty()) {
    return absl::FailedPreconditionError(
        fmt::format("{} is mounted read-only, so nothing was written there", mount_point));
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> references,
                   PinnedImages(mount, options.images_left_out));
  ASSIGN_OR_RETURN(std::vector<fs::Image> images, Open(references, options));
  return CommitWritten({.upper = mount.upper,
                        .lower_uppers = {mount.lower_uppers.rbegin(), mount.lower_uppers.rend()},
                        .mount_point = mount_point},
                       std::move(images), options);
}

absl::StatusOr<fs::CommitResult> CommitContainer(fs::Client& client, const std::string& name_space,
                                                 const std::string& id,
                                                 const WrittenCommitOptions& options) {
  ASSIGN_OR_RETURN(const nlohmann::json container,
                   client.Call({{"op", "container"}, {"name_space", name_space}, {"id", id}},
                               /*start_engine=*/false));
  const oci::Field fields(container, "container");
  std::vector<std::string> references(1);
  ASSIGN_OR_RETURN(references[0], fields.OptionalString("image"));
  ASSIGN_OR_RETURN(const std::vector<std::string> on_top, fields.OptionalStrings("layer_images"));
  references.insert(references.end(), on_top.begin(), on_top.end());
  ASSIGN_OR_RETURN(const std::vector<std::string> layers, fields.OptionalStrings("layers"));
  Written written;
  ASSIGN_OR_RETURN(written.upper, fields.OptionalString("upper"));
  ASSIGN_OR_RETURN(written.mount_point, MountPointOf(written.upper));
  ASSIGN_OR_RETURN(std::vector<fs::Image> images, Open(references, options));
  std::vector<std::string> opened;
  for (const fs::Image& image : images) {
    for (const auto& layer : image.layers) opened.push_back(layer.digest.ToString());
  }
  if (opened != layers) {
    return absl::FailedPreconditionError(
        fmt::format("container {} runs on {} layers that are not the {} of {}", id, layers.size(),
                    opened.size(), fmt::join(references, " + ")));
  }
  return CommitWritten(written, std::move(images), options);
}

}  // namespace lamina::backends
