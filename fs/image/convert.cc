// SPDX-License-Identifier: Apache-2.0
#include "fs/image/convert.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <system_error>
#include <tuple>

#include "chunkstore/base/json.h"
#include "erofs/import.h"
#include "fs/image/layer_stream.h"
#include "fs/image/layer_writer.h"
#include "fs/image/layout_writer.h"
#include "fs/image/reference.h"
#include "fs/image/source.h"

namespace lamina::fs {
namespace {

namespace stdfs = std::filesystem;
using Clock = std::chrono::steady_clock;
constexpr Clock::duration kProgressInterval = std::chrono::milliseconds(100);

chunkstore::BlobWriterOptions BlobOptions(const ConvertOptions& options) {
  return {.level = options.level, .jobs = options.jobs};
}

class ProgressMeter {
 public:
  ProgressMeter(const ConvertOptions& options, size_t layers, uint64_t source_bytes)
      : callback_(options.progress), progress_{.layers = layers, .source_bytes = source_bytes} {}

  void BeginLayer(size_t layer) {
    progress_.layer = layer;
    before_layer_ = progress_.source_bytes_read;
    Call();
  }
  // `bytes` of the current layer have been read.
  void Update(uint64_t bytes) {
    progress_.source_bytes_read = before_layer_ + bytes;
    if (callback_ && Clock::now() - last_call_ >= kProgressInterval) Call();
  }
  void Call() {
    if (callback_) callback_(progress_);
    last_call_ = Clock::now();
  }

 private:
  const std::function<void(const ConvertOptions::Progress&)>& callback_;
  ConvertOptions::Progress progress_;
  uint64_t before_layer_ = 0;
  Clock::time_point last_call_;
};

// Tells how much of a directory has been read. Its size is not known in advance.
class ProgressSink : public erofs::ContentSink {
 public:
  ProgressSink(erofs::ContentSink& sink, ProgressMeter& progress)
      : sink_(sink), progress_(progress) {}

  absl::Status BeginFile(uint64_t size) override { return sink_.BeginFile(size); }
  absl::Status Append(std::span<const std::byte> data) override {
    bytes_ += data.size();
    progress_.Update(bytes_);
    return sink_.Append(data);
  }
  absl::Status AppendHole(uint64_t length) override { return sink_.AppendHole(length); }
  absl::StatusOr<std::vector<erofs::Extent>> EndFile() override { return sink_.EndFile(); }

 private:
  erofs::ContentSink& sink_;
  ProgressMeter& progress_;
  uint64_t bytes_ = 0;
};

// Damaged content shows in many ways, in the decompressor or in the tar reader. That it is not what
// the manifest promised is the cause to name.
absl::Status ExplainFailure(absl::Status status, const SourceLayer& layer) {
  const bool may_be_damage = absl::IsDataLoss(status) || absl::IsInvalidArgument(status);
  if (!may_be_damage || !layer.digest) return status;
  const absl::StatusOr<Digest> actual = HashFile(layer.content);
  if (!actual.ok() || *actual == *layer.digest) return status;
  return absl::DataLossError(
      fmt::format("digest mismatch: {} was expected, the content has {} ({})",
                  layer.digest->ToString(), actual->ToString(), std::string(status.message())));
}

absl::StatusOr<ConvertedLayer> ConvertLayer(LayoutWriter& output, const ConvertOptions& options,
                                            const SourceLayer& layer, ProgressMeter& progress) {
  ASSIGN_OR_RETURN(const std::unique_ptr<LayerStream> stream,
                   LayerStream::Open(layer.content, layer.digest, layer.diff_id));
  const auto read = [&](std::span<std::byte> into) {
    progress.Update(stream->source_bytes_read());
    return stream->Read(into);
  };
  absl::StatusOr<WrittenLayer> written =
      WriteLayer(output, BlobOptions(options), layer.diff_id,
                 [&](erofs::ContentSink& sink) { return erofs::ImportTar(read, sink); });
  if (!written.ok()) return ExplainFailure(written.status(), layer);
  return ConvertedLayer{.source_digest = stream->digest(),
                        .source_size = layer.content.size,
                        .files = written->inodes,
                        .blob = written->blob};
}

oci::Descriptor LayerDescriptor(const ConvertedLayer& layer) {
  oci::Descriptor descriptor{.media_type = std::string(oci::kLaminaLayerType),
                             .digest = layer.blob.digest,
                             .size = layer.blob.size};
  descriptor.annotations = {
      {std::string(oci::kSectionTableOffsetKey),
       fmt::format("{}", layer.blob.section_table_offset)},
      {std::string(oci::kSectionTableDigestKey), layer.blob.section_table_digest.ToString()},
  };
  return descriptor;
}

// Writes configuration and manifest, and makes the image visible under `tag`.
absl::StatusOr<Digest> FinishImage(LayoutWriter& output, const std::string& tag,
                                   const std::string& config_json, const oci::Platform& platform,
                                   std::vector<oci::Descriptor> layers,
                                   std::map<std::string, std::string> annotations) {
  const oci::Manifest manifest{
      .media_type = std::string(oci::kManifestType),
      .config = {.media_type = std::string(oci::kConfigType),
                 .digest = Digest::Of(AsBytes(config_json)),
                 .size = config_json.size()},
      .layers = std::move(layers),
      .annotations = std::move(annotations),
  };
  const std::string manifest_json = manifest.ToJson();
  RETURN_IF_ERROR(output.AddDocument(config_json));
  RETURN_IF_ERROR(output.AddDocument(manifest_json));
  oci::Descriptor entry{.media_type = std::string(oci::kManifestType),
                        .digest = Digest::Of(AsBytes(manifest_json)),
                        .size = manifest_json.size(),
                        .platform = platform};
  if (!tag.empty()) entry.annotations[std::string(oci::kRefNameKey)] = tag;
  RETURN_IF_ERROR(output.Commit(entry));
  return entry.digest;
}

absl::StatusOr<ConvertResult> ConvertImage(const ConvertOptions& options,
                                           const ImageReference& reference,
                                           const ImageReference& destination) {
  ASSIGN_OR_RETURN(const SourceImage source, OpenSource(reference, options.platform));
  ASSIGN_OR_RETURN(const std::unique_ptr<LayoutWriter> output,
                   LayoutWriter::Create(destination.path));
  // Some images have a layer twice. It is equal only if every digest it is checked against is.
  using Key = std::tuple<std::optional<Digest>, uint64_t, Digest>;
  std::map<Key, ConvertedLayer> converted;
  const auto key_of = [](const SourceLayer& layer) {
    return Key(layer.digest, layer.content.offset, layer.diff_id);
  };
  std::map<Key, uint64_t> sizes;
  for (const SourceLayer& layer : source.layers) sizes[key_of(layer)] = layer.content.size;
  uint64_t source_bytes = 0;
  for (const auto& [key, size] : sizes) source_bytes += size;

  ProgressMeter progress(options, source.layers.size(), source_bytes);
  ConvertResult result;
  std::vector<oci::Descriptor> descriptors;
  for (size_t i = 0; i < source.layers.size(); ++i) {
    const SourceLayer& layer = source.layers[i];
    auto done = converted.find(key_of(layer));
    if (done == converted.end()) {
      progress.BeginLayer(i);
      ASSIGN_OR_RETURN(const ConvertedLayer made, ConvertLayer(*output, options, layer, progress),
                       "layer {} ({})", i, layer.digest.value_or(layer.diff_id).ToString());
      progress.Update(layer.content.size);
      done = converted.emplace(key_of(layer), made).first;
    }
    result.layers.push_back(done->second);
    descriptors.push_back(LayerDescriptor(done->second));
    descriptors.back().annotations[std::string(oci::kSourceDigestKey)] =
        done->second.source_digest.ToString();
  }
  ASSIGN_OR_RETURN(result.manifest_digest,
                   FinishImage(*output, destination.name, source.config_json,
                               source.config.platform, std::move(descriptors), source.annotations));
  progress.Call();
  return result;
}

// A configuration for a bare directory: nothing in it but what the content and platform say, so
// that it is reproducible. There is no tar archive whose digest could be the diff_id: the layer
// blob's own stands in.
std::string MakeConfig(const oci::Platform& platform, const Digest& layer) {
  nlohmann::json config = {
      {"architecture", platform.architecture},
      {"os", platform.os},
      {"config", nlohmann::json::object()},
      {"rootfs", {{"type", "layers"}, {"diff_ids", {layer.ToString()}}}},
      {"history", nlohmann::json::array({{{"created_by", "lamina convert dir:"}}})},
  };
  if (!platform.variant.empty()) config["variant"] = platform.variant;
  return oci::ToCanonicalJson(config);
}

// A layout inside the directory would be read while it is written. On another file system it is not
// in the way, as the import does not cross mounts.
absl::Status CheckIsOutside(const std::string& layout, const std::string& directory) {
  std::error_code error;
  const stdfs::path inner = stdfs::weakly_canonical(layout, error);
  const stdfs::path outer = stdfs::weakly_canonical(directory, error);
  const bool is_inside =
      std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
  struct stat inner_info {};
  struct stat outer_info {};
  const bool same_device = ::stat(inner.parent_path().c_str(), &inner_info) == 0 &&
                           ::stat(outer.c_str(), &outer_info) == 0 &&
                           inner_info.st_dev == outer_info.st_dev;
  if (!is_inside || !same_device) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("the destination {} is inside the directory to convert", layout));
}

absl::StatusOr<ConvertResult> ConvertDirectory(const ConvertOptions& options,
                                               const ImageReference& reference,
                                               const ImageReference& destination) {
  RETURN_IF_ERROR(CheckIsOutside(destination.path, reference.path));
  ASSIGN_OR_RETURN(const std::unique_ptr<LayoutWriter> output,
                   LayoutWriter::Create(destination.path));
  ProgressMeter progress(options, 1, 0);
  progress.BeginLayer(0);
  ASSIGN_OR_RETURN(const WrittenLayer written,
                   WriteLayer(*output, BlobOptions(options), std::nullopt,
                              [&](erofs::ContentSink& sink) {
                                ProgressSink counted(sink, progress);
                                return erofs::ImportDirectory(reference.path, counted);
                              }),
                   "directory {}", reference.path);
  const ConvertedLayer layer{.source_digest = written.blob.digest,
                             .source_size = written.blob.content_bytes,
                             .files = written.inodes,
                             .blob = written.blob};
  progress.Update(layer.source_size);

  const oci::Platform platform = options.platform.value_or(oci::Platform::Host());
  ConvertResult result;
  ASSIGN_OR_RETURN(result.manifest_digest,
                   FinishImage(*output, destination.name, MakeConfig(platform, layer.blob.digest),
                               platform, {LayerDescriptor(layer)}, {}));
  result.layers.push_back(layer);
  progress.Call();
  return result;
}

}  // namespace

absl::StatusOr<ConvertResult> Convert(const ConvertOptions& options) {
  ASSIGN_OR_RETURN(const ImageReference source, ImageReference::Parse(options.source));
  ASSIGN_OR_RETURN(const ImageReference destination,
                   ImageReference::ParseConverted(options.destination), "destination");
  absl::StatusOr<ConvertResult> result = source.transport == ImageTransport::kDirectory
                                             ? ConvertDirectory(options, source, destination)
                                             : ConvertImage(options, source, destination);
  if (!result.ok()) return Annotate(result.status(), "convert " + options.source);
  return result;
}

}  // namespace lamina::fs
