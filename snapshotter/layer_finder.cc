// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/layer_finder.h"

#include <spdlog/spdlog.h>

#include <absl/strings/str_split.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "chunkstore/registry/reference.h"
#include "fs/image/image.h"
#include "fs/image/oci.h"
#include "snapshotter/content_client.h"

namespace lamina::snapshotter {
namespace {

using Clock = std::chrono::steady_clock;
using fs::AttachedLayer;
using fs::Image;

// Labels of clients that tell (containerd, pkg/snapshotters/annotations.go).
constexpr char kImageReferenceLabel[] = "containerd.io/snapshot/cri.image-ref";
constexpr char kManifestDigestLabel[] = "containerd.io/snapshot/cri.manifest-digest";
// Labels in containerd's content store: of a manifest, and of what came from a repository.
constexpr char kConfigLabel[] = "containerd.io/gc.ref.content.config";
constexpr std::string_view kSourcePrefix = "containerd.io/distribution.source.";

// For so long after it was asked for, an image's layers stay attached, and one that has no converted
// one is not looked for again.
constexpr std::chrono::minutes kKeep{2};
// An image that may not be converted is not asked for again for so long after that has failed: each of
// its layers would wait for a registry that does not answer.
constexpr std::chrono::seconds kRememberFailure{60};
// Manifests that are remembered.
constexpr size_t kMaxManifests = 4096;

// "default/7/extract-1 sha256:..." is in the name space "default" (containerd, metadata/snapshot.go).
std::string NamespaceOf(const std::string& key) { return key.substr(0, key.find('/')); }

std::string LabelOf(const Labels& labels, std::string_view name) {
  const auto label = labels.find(std::string(name));
  return label == labels.end() ? "" : label->second;
}

// An image that is being pulled, opened once for all of its layers.
struct Pull {
  std::mutex mutex;  // held while it is opened
  bool opened = false;
  absl::Status status;
  Clock::time_point failed;  // when `status` became an error
  std::shared_ptr<const Image> image;
  std::vector<absl::StatusOr<AttachedLayer>> layers;
  std::unique_ptr<fs::Prefetcher::Ticket> prefetch;  // of what its start will read
  Clock::time_point used;                            // guarded by the finder's mutex
};

// What a manifest in containerd's store is of.
struct KnownManifest {
  std::vector<Digest> diff_ids;
  std::vector<oci::Descriptor> layers;
};

class ContentLayerFinder final : public LayerFinder {
 public:
  ContentLayerFinder(const LayerFinderOptions& options, fs::Engine& engine)
      : options_(options),
        engine_(engine),
        content_(ContentClient::Create(options.containerd)),
        reaper_([this](const std::stop_token& stop) { DropIdle(stop); }) {}

  absl::StatusOr<std::optional<LazyLayer>> Find(const LayerQuery& query) override;

 private:
  absl::StatusOr<std::vector<std::string>> ReferencesFor(const LayerQuery& query, bool converted);
  absl::StatusOr<std::vector<std::string>> ReferencesInContent(const LayerQuery& query,
                                                               bool converted);
  absl::StatusOr<KnownManifest> ReadManifest(const std::string& name_space, const Digest& digest);
  std::vector<std::string> References(const ContentInfo& manifest) const;
  std::shared_ptr<Pull> PullOf(const std::string& reference);
  // Lets go of images that nobody has asked for lately, until it is stopped.
  void DropIdle(const std::stop_token& stop);
  void Open(const std::string& reference, Pull& pull);
  absl::StatusOr<std::optional<LazyLayer>> FindIn(const std::string& reference,
                                                  const LayerQuery& query);

  const LayerFinderOptions options_;
  fs::Engine& engine_;
  const std::unique_ptr<ContentClient> content_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Pull>> pulls_;  // by reference
  std::map<Digest, KnownManifest> manifests_;
  std::condition_variable_any asked_;
  std::jthread reaper_;  // last: it uses the rest
};

absl::StatusOr<std::optional<LazyLayer>> ContentLayerFinder::Find(const LayerQuery& query) {
  const bool converted = IsConverted(query.labels);
  if (!converted && !options_.referrers) return std::nullopt;
  const auto references = ReferencesFor(query, converted);
  absl::Status failure = references.status();
  if (references.ok()) {
    for (const std::string& reference : *references) {
      auto layer = FindIn(reference, query);
      if (layer.ok() && layer->has_value()) return layer;
      if (failure.ok()) failure = layer.status();
    }
  }
  if (converted) {
    if (!failure.ok()) return failure;
    return absl::NotFoundError(
        fmt::format("no manifest in containerd has the converted layer {} and tells its registry",
                    query.chain_id));
  }
  if (!failure.ok()) {
    spdlog::warn("layer {} is unpacked: {}", query.chain_id, std::string(failure.message()));
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<std::string>> ContentLayerFinder::ReferencesFor(const LayerQuery& query,
                                                                           bool converted) {
  const std::string name = LabelOf(query.labels, kImageReferenceLabel);
  if (name.empty()) return ReferencesInContent(query, converted);
  ASSIGN_OR_RETURN(registry::Reference reference, registry::Reference::Parse(name));
  if (const std::string digest = LabelOf(query.labels, kManifestDigestLabel); !digest.empty()) {
    ASSIGN_OR_RETURN(reference.digest, Digest::Parse(digest));
    reference.tag.clear();
  }
  return std::vector<std::string>{"docker://" + reference.ToString()};
}

absl::StatusOr<std::vector<std::string>> ContentLayerFinder::ReferencesInContent(
    const LayerQuery& query, bool converted) {
  const std::string name_space = NamespaceOf(query.key);
  ASSIGN_OR_RETURN(const std::vector<ContentInfo> manifests,
                   content_->List(name_space, {fmt::format("labels.\"{}\"", kConfigLabel)}));
  std::vector<std::string> references;
  for (const ContentInfo& info : manifests) {
    const absl::StatusOr<KnownManifest> manifest = ReadManifest(name_space, info.digest);
    if (!manifest.ok()) {
      // It may have been removed meanwhile, or be something else than an image.
      spdlog::debug("manifest {}: {}", info.digest.ToString(),
                    std::string(manifest.status().message()));
      continue;
    }
    if (manifest->diff_ids.size() <= query.depth || manifest->layers.size() <= query.depth ||
        ChainId(manifest->diff_ids, query.depth + 1) != query.chain_id) {
      continue;
    }
    // An image and its converted one have the same chain.
    const oci::Descriptor& layer = manifest->layers[query.depth];
    if ((layer.media_type == oci::kLaminaLayerType) != converted) continue;
    for (std::string& reference : References(info)) references.push_back(std::move(reference));
  }
  return references;
}

absl::StatusOr<KnownManifest> ContentLayerFinder::ReadManifest(const std::string& name_space,
                                                               const Digest& digest) {
  {
    std::lock_guard lock(mutex_);
    if (const auto known = manifests_.find(digest); known != manifests_.end()) return known->second;
  }
  ASSIGN_OR_RETURN(const std::string text, content_->Read(name_space, digest));
  ASSIGN_OR_RETURN(oci::Manifest manifest, oci::Manifest::Parse(text));
  ASSIGN_OR_RETURN(const std::string config_text,
                   content_->Read(name_space, manifest.config.digest));
  ASSIGN_OR_RETURN(oci::ImageConfig config, oci::ImageConfig::Parse(config_text));
  KnownManifest known{std::move(config.diff_ids), std::move(manifest.layers)};
  std::lock_guard lock(mutex_);
  if (manifests_.size() >= kMaxManifests) manifests_.clear();
  return manifests_.emplace(digest, std::move(known)).first->second;
}

std::vector<std::string> ContentLayerFinder::References(const ContentInfo& manifest) const {
  std::vector<std::string> references;
  for (const auto& [label, repositories] : manifest.labels) {
    if (!label.starts_with(kSourcePrefix)) continue;
    const std::string name = label.substr(kSourcePrefix.size());
    std::vector<std::string> hosts;
    for (const std::string& known : options_.registries) {
      if (known.starts_with(name + ":")) hosts.push_back(known);
    }
    if (hosts.empty()) hosts.push_back(name);
    for (const absl::string_view repository : absl::StrSplit(repositories, ',')) {
      for (const std::string& host : hosts) {
        references.push_back(fmt::format("docker://{}/{}@{}", host, std::string(repository),
                                         manifest.digest.ToString()));
      }
    }
  }
  return references;
}

std::shared_ptr<Pull> ContentLayerFinder::PullOf(const std::string& reference) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Pull>& pull = pulls_[reference];
  if (pull == nullptr) pull = std::make_shared<Pull>();
  pull->used = Clock::now();
  asked_.notify_all();
  return pull;
}

void ContentLayerFinder::DropIdle(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    Clock::time_point next = Clock::time_point::max();
    std::vector<std::shared_ptr<Pull>> idle;
    for (auto it = pulls_.begin(); it != pulls_.end();) {
      const Clock::time_point due = it->second->used + kKeep;
      if (due <= Clock::now()) {
        idle.push_back(std::move(it->second));
        it = pulls_.erase(it);
      } else {
        next = std::min(next, due);
        ++it;
      }
    }
    if (!idle.empty()) {  // let go of without the lock
      lock.unlock();
      idle.clear();
      lock.lock();
      continue;
    }
    if (pulls_.empty()) {
      asked_.wait(lock, stop, [this] { return !pulls_.empty(); });
    } else {
      asked_.wait_until(lock, stop, next, [] { return false; });
    }
  }
}

void ContentLayerFinder::Open(const std::string& reference, Pull& pull) {
  absl::StatusOr<Image> image = engine_.OpenImage(reference, options_.registry);
  pull.status = image.status();
  if (!image.ok()) pull.failed = Clock::now();
  // What has failed for a reason that passes is tried again.
  pull.opened = image.ok() || absl::IsFailedPrecondition(image.status());
  if (!image.ok()) return;
  pull.image = std::make_shared<const Image>(*std::move(image));
  pull.layers = engine_.AttachLayers(*pull.image, /*on_others=*/false);
  std::vector<std::shared_ptr<chunkstore::Blob>> blobs;
  for (const auto& layer : pull.layers) {
    if (!layer.ok()) return;
    blobs.push_back(layer->blob);
  }
  // A container is likely to be started next.
  if (options_.prefetch) pull.prefetch = engine_.PrefetchStart(*pull.image, std::move(blobs));
}

absl::StatusOr<std::optional<LazyLayer>> ContentLayerFinder::FindIn(const std::string& reference,
                                                                    const LayerQuery& query) {
  const std::shared_ptr<Pull> pull = PullOf(reference);
  std::lock_guard lock(pull->mutex);
  const bool has_just_failed = !pull->status.ok() && Clock::now() - pull->failed < kRememberFailure;
  if (!pull->opened && (IsConverted(query.labels) || !has_just_failed)) Open(reference, *pull);
  if (absl::IsFailedPrecondition(pull->status))
    return std::nullopt;  // neither converted nor attached
  RETURN_IF_ERROR(pull->status);
  const Image& image = *pull->image;
  if (image.layers.size() <= query.depth ||
      ChainId(image.config.diff_ids, query.depth + 1) != query.chain_id) {
    return absl::DataLossError(fmt::format("{}: layer {} is not {}, as containerd says", reference,
                                           query.depth, query.chain_id));
  }
  const absl::StatusOr<AttachedLayer>& layer = pull->layers[query.depth];
  if (!layer.ok()) {
    pull->opened = false;
    return Annotate(layer.status(), reference);
  }
  return LazyLayer{.layer = image.layers[query.depth], .image = reference, .marks = layer->marks};
}

}  // namespace

bool IsConverted(const Labels& labels) {
  return labels.contains(std::string(oci::kSectionTableDigestKey));
}

std::string ChainId(const std::vector<Digest>& diff_ids, size_t count) {
  std::string chain;
  for (size_t i = 0; i < count && i < diff_ids.size(); ++i) {
    const std::string diff_id = diff_ids[i].ToString();
    chain = i == 0 ? diff_id : Digest::Of(AsBytes(chain + " " + diff_id)).ToString();
  }
  return chain;
}

std::unique_ptr<LayerFinder> LayerFinder::Create(const LayerFinderOptions& options,
                                                 fs::Engine& engine) {
  return std::make_unique<ContentLayerFinder>(options, engine);
}

}  // namespace lamina::snapshotter
