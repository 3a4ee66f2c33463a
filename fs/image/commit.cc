// SPDX-License-Identifier: Apache-2.0
#include "fs/image/commit.h"

#include <memory>
#include <utility>

#include "erofs/import.h"
#include "fs/image/image_document.h"

namespace lamina::fs {
namespace {

using std::chrono::steady_clock;

// Both a file that changed while it was read and an upload that a registry lost are worth another try.
constexpr int kCommitAttempts = 3;

// Stops writers once at the most, and lets them go on when it goes.
class WriterPause {
 public:
  WriterPause(const CommitOptions& options, std::chrono::microseconds& paused)
      : options_(options), paused_(paused) {}
  WriterPause(const WriterPause&) = delete;
  WriterPause& operator=(const WriterPause&) = delete;
  ~WriterPause() { End(); }

  absl::Status Begin() {
    start_ = steady_clock::now();
    RETURN_IF_ERROR(options_.pause(), "pause what runs there");
    active_ = true;
    return absl::OkStatus();
  }
  void End() {
    if (!std::exchange(active_, false)) return;
    options_.resume();
    paused_ += std::chrono::duration_cast<std::chrono::microseconds>(steady_clock::now() - start_);
  }

 private:
  const CommitOptions& options_;
  std::chrono::microseconds& paused_;
  steady_clock::time_point start_;
  bool active_ = false;
};

absl::StatusOr<WrittenLayer> TryToWriteUpper(ImageWriter& output, const CommitOptions& options,
                                             std::chrono::microseconds& paused) {
  WriterPause pause(options, paused);
  erofs::UpperOptions upper{.user_xattrs = options.user_xattrs};
  if (options.pause != nullptr) upper.pause = [&pause] { return pause.Begin(); };
  const auto read = [&](erofs::ContentSink& sink) {
    absl::StatusOr<erofs::Tree> tree = erofs::ImportUpper(options.upper, sink, upper);
    pause.End();  // before the rest is compressed and sent
    return tree;
  };
  return WriteLayer(output, {.level = options.level, .jobs = options.jobs}, std::nullopt, read);
}

absl::StatusOr<WrittenLayer> WriteUpper(ImageWriter& output, const CommitOptions& options,
                                        std::chrono::microseconds& paused) {
  absl::StatusOr<WrittenLayer> layer = TryToWriteUpper(output, options, paused);
  for (int attempt = 1; absl::IsAborted(layer.status()) && attempt < kCommitAttempts; ++attempt) {
    layer = TryToWriteUpper(output, options, paused);
  }
  return layer;
}

// The upper first: it is what it is now, and nothing else changes.
absl::Status WriteUppers(ImageWriter& output, const CommitOptions& options, CommitResult& result) {
  ASSIGN_OR_RETURN(const WrittenLayer layer, WriteUpper(output, options, result.paused));
  CommitOptions lower = options;
  lower.pause = nullptr;
  for (const std::string& upper : options.lower_uppers) {
    lower.upper = upper;
    ASSIGN_OR_RETURN(const WrittenLayer below, WriteUpper(output, lower, result.paused));
    result.layers.push_back(below);
  }
  result.layers.push_back(layer);
  return absl::OkStatus();
}

absl::Status AddLayersBelow(ImageWriter& output, const CommitOptions& options,
                            std::vector<oci::Descriptor>& layers, CommitResult& result) {
  for (const Image& image : options.images) {
    for (const oci::Descriptor& layer : image.manifest.layers) {
      absl::StatusOr<Transfer> transfer = output.AddFrom(*image.store, layer);
      for (int attempt = 1; absl::IsAborted(transfer.status()) && attempt < kCommitAttempts;
           ++attempt) {
        transfer = output.AddFrom(*image.store, layer);
      }
      RETURN_IF_ERROR(transfer.status(), "layer {} of {}", layer.digest.ToString(),
                      image.reference);
      result.layers_there += *transfer == Transfer::kThere;
      result.layers_linked += *transfer == Transfer::kLinked;
      result.layers_mounted += *transfer == Transfer::kMounted;
      result.layers_copied += *transfer == Transfer::kCopied;
      if (*transfer == Transfer::kCopied) result.copied_bytes += layer.size;
      layers.push_back(layer);
    }
  }
  return absl::OkStatus();
}

// What the new image's history says of the layers above the first image's.
std::vector<LayerHistory> HistoryOf(const CommitOptions& options,
                                    const std::vector<WrittenLayer>& written) {
  std::vector<LayerHistory> layers;
  for (size_t i = 1; i < options.images.size(); ++i) {
    for (const Digest& diff_id : options.images[i].config.diff_ids) {
      layers.push_back(
          {.diff_id = diff_id, .created_by = "layer of " + options.images[i].reference});
    }
  }
  for (const WrittenLayer& layer : written) {
    layers.push_back({.diff_id = layer.blob.digest,
                      .created_by = "lamina commit",
                      .created = TimestampNow(),
                      .comment = options.comment});
  }
  return layers;
}

absl::Status CheckLayerCount(const CommitOptions& options) {
  size_t count = 1 + options.lower_uppers.size();
  for (const Image& image : options.images) count += image.layers.size();
  if (count <= oci::kMaxLayers) return absl::OkStatus();
  return absl::FailedPreconditionError(
      fmt::format("it would have {} layers, and an image has {} at the most: convert a mount of it "
                  "(lamina convert dir:...) into an image of one layer",
                  count, oci::kMaxLayers));
}

absl::StatusOr<CommitResult> CommitTo(const ImageReference& destination,
                                      const CommitOptions& options) {
  RETURN_IF_ERROR(CheckLayerCount(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageWriter> output,
                   OpenWriter(destination, options.access, /*source=*/nullptr));
  CommitResult result;
  RETURN_IF_ERROR(WriteUppers(*output, options, result));
  std::vector<oci::Descriptor> layers;
  RETURN_IF_ERROR(AddLayersBelow(*output, options, layers, result));
  for (const WrittenLayer& layer : result.layers) layers.push_back(DescribeLayer(layer.blob));

  const bool alone = options.images.empty();
  const oci::Platform platform = alone ? oci::Platform::Host() : options.images[0].config.platform;
  const std::string below = alone ? EmptyConfig(platform) : options.images[0].config_json;
  ASSIGN_OR_RETURN(const std::string config, AddLayers(below, HistoryOf(options, result.layers)));
  ASSIGN_OR_RETURN(const ImageDocument made,
                   MakeManifest(*output, config, platform, std::move(layers),
                                alone ? std::map<std::string, std::string>()
                                      : options.images[0].manifest.annotations,
                                std::nullopt));
  RETURN_IF_ERROR(output->CommitImage(made.descriptor, made.content));
  result.manifest_digest = made.descriptor.digest;
  return result;
}

}  // namespace

absl::StatusOr<CommitResult> Commit(const CommitOptions& options) {
  ASSIGN_OR_RETURN(const ImageReference destination,
                   ImageReference::ParseConverted(options.destination), "destination");
  absl::StatusOr<CommitResult> result = CommitTo(destination, options);
  if (!result.ok()) return Annotate(result.status(), "commit to " + options.destination);
  return result;
}

}  // namespace lamina::fs
