// SPDX-License-Identifier: Apache-2.0
//
// Mounts that start from what is in another one.
#include <spdlog/spdlog.h>

#include <utility>

#include "chunkstore/base/program.h"
#include "fs/engine/engine_impl.h"

namespace lamina::fs {
namespace {

// With one request: a limit against mistakes.
constexpr uint64_t kMaxForks = 10'000;

// Each fork has a token of its own, so that what is there of a request that comes again is found.
std::string TokenOf(const ForkRequest& request, uint64_t index) {
  return fmt::format("{}-fork-{}", request.token, index);
}

}  // namespace

// A fork as far as all of one request are the same. `there` gets those that an earlier try has made.
absl::StatusOr<MountState> EngineImpl::ForkState(const ForkRequest& request,
                                                 std::vector<MountDescription>& there,
                                                 std::string& upper) {
  std::lock_guard lock(mutex_);
  const auto found = mounts_.find(request.target);
  if (found == mounts_.end()) {
    return absl::NotFoundError(fmt::format("no image is mounted at {}", request.target));
  }
  const MountState& source = found->second;
  const MountDescription& description = source.record.description;
  if (!description.writable) {
    return absl::FailedPreconditionError(
        "it is read-only: others see the same in a mount of the same image");
  }
  if (source.served->blobs.empty() && !source.record.layers.empty()) {
    return absl::UnavailableError("its layers are being fetched again: try later");
  }
  upper = description.upper;
  MountState fork;
  fork.record.description = {.image = description.image,
                             .manifest_digest = description.manifest_digest,
                             .layer_images = description.layer_images,
                             .transport = description.transport,
                             .loop = description.loop,
                             .writable = true,
                             .lower_uppers = description.lower_uppers,
                             .reason = "forked from " + request.target};
  fork.record.registry = source.record.registry;
  fork.record.prefetch = source.record.prefetch;
  fork.record.layers = source.record.layers;
  fork.record.metadata = source.record.metadata;
  fork.record.metadata_inode = source.record.metadata_inode;
  fork.copies = source.copies;
  fork.image_use = source.image_use;
  fork.served = std::make_shared<ServedImage>();
  fork.served->blobs = source.served->blobs;
  fork.served->metadata = source.served->metadata;
  if (request.token.empty()) return fork;
  for (const auto& [target, mount] : mounts_) {
    for (uint64_t i = 0; i < request.count; ++i) {
      if (mount.record.token != TokenOf(request, i)) continue;
      there.push_back(mount.record.description);
      fork.copies = mount.copies;
      fork.record.description.lower_uppers = mount.record.description.lower_uppers;
    }
  }
  return fork;
}

absl::StatusOr<std::vector<MountDescription>> EngineImpl::Fork(const ForkRequest& request) {
  const std::string what = "fork " + request.target;
  RETURN_IF_ERROR(
      CheckRequest({.target = request.target, .mount_namespace = request.mount_namespace}));
  if (request.count == 0 || request.count > kMaxForks) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} forks: from 1 to {}", what, request.count, kMaxForks));
  }
  std::vector<MountDescription> forks;
  std::string upper;
  ASSIGN_OR_RETURN(MountState state, ForkState(request, forks, upper), "{}", what);
  std::shared_ptr<const MergedMetadata>& metadata = state.served->metadata;
  if (metadata == nullptr) {  // of a mount that was taken over
    ASSIGN_OR_RETURN(metadata, OpenMergedMetadata(state.record.metadata), "{}", what);
  }
  if (forks.empty()) {
    ASSIGN_OR_RETURN(TemporaryDirectory directory,
                     TemporaryDirectory::Create(state_ + "/mounts", kCopyPrefix), "{}", what);
    auto copy = std::make_shared<UpperCopy>(directory.Keep());
    const absl::Status copied = CopyTree(upper, copy->upper());
    {
      // If it was unmounted, the copy may be of what was left.
      std::lock_guard lock(mutex_);
      const auto source = mounts_.find(request.target);
      if (source == mounts_.end() || source->second.record.description.upper != upper) {
        return absl::NotFoundError(what + ": it was unmounted meanwhile");
      }
    }
    RETURN_IF_ERROR(copied, "{}: copy what was written", what);
    auto& uppers = state.record.description.lower_uppers;
    uppers.insert(uppers.begin(), copy->upper());
    state.copies.insert(state.copies.begin(), std::move(copy));
  }
  for (uint64_t i = forks.size(); i < request.count; ++i) {
    MountState fork;
    fork.record = state.record;
    fork.record.token = TokenOf(request, i);
    fork.copies = state.copies;
    fork.image_use = state.image_use;
    // For the case that the source is gone: they share what serves it, or the first of them.
    fork.served = std::make_shared<ServedImage>();
    fork.served->blobs = state.served->blobs;
    fork.served->metadata = metadata;
    fork.served->stats = std::make_shared<chunkstore::ReadStats>();
    fork.served->key = KeyToShare(fork.record);
    absl::StatusOr<MountDescription> mounted;
    {
      std::lock_guard lock(mutex_);
      const std::string target = MountPaths(state_, NextMountId(state_), "").own_target;
      fork.record.description.target = target;
      mounted =
          MountLocked({.image = state.record.description.image, .target = target}, std::move(fork));
    }
    if (!mounted.ok()) {
      for (const MountDescription& made : forks) {
        if (absl::Status status = Unmount(made.target); !status.ok()) {
          spdlog::error("{}", std::string(status.message()));
        }
      }
      return Annotate(mounted.status(), what);
    }
    forks.push_back(*std::move(mounted));
  }
  return forks;
}

}  // namespace lamina::fs
