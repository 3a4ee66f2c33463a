// SPDX-License-Identifier: Apache-2.0
#include "fs/image/convert.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <tuple>

#include "erofs/builder.h"
#include "erofs/import.h"
#include "fs/image/json.h"
#include "fs/image/layer_stream.h"
#include "fs/image/layout_writer.h"
#include "fs/image/reference.h"
#include "fs/image/source.h"

namespace lamina::fs {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Clock::duration kProgressInterval = std::chrono::milliseconds(100);

// Hands file content from the importers of erofs/ to a blob, and its places back.
class BlobSink : public erofs::ContentSink {
 public:
  explicit BlobSink(chunkstore::BlobWriter& blob) : blob_(blob) {}

  absl::Status BeginFile(uint64_t size) override { return blob_.BeginFile(size); }
  absl::Status Append(std::span<const std::byte> data) override { return blob_.Append(data); }
  absl::Status AppendHole(uint64_t length) override { return blob_.AppendHole(length); }

  absl::StatusOr<std::vector<erofs::Extent>> EndFile() override {
    ASSIGN_OR_RETURN(const std::vector<chunkstore::Placement> placements, blob_.EndFile());
    std::vector<erofs::Extent> extents;
    extents.reserve(placements.size());
    for (const chunkstore::Placement& placement : placements) {
      extents.push_back({placement.offset, placement.length, kBlobSlot, placement.block});
    }
    return extents;
  }

 private:
  static constexpr uint16_t kBlobSlot = 1;  // in the layer's device table
  chunkstore::BlobWriter& blob_;
};

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

// A UUID (RFC 9562, version 8: made by a rule of our own) from a digest, so that it says nothing
// but what the content says. overlayfs wants layers to have different ones.
std::array<uint8_t, 16> UuidFrom(const Digest& digest) {
  std::array<uint8_t, 16> uuid{};
  std::copy_n(digest.bytes.begin(), uuid.size(), uuid.begin());
  uuid[6] = (uuid[6] & 0x0f) | 0x80;
  uuid[8] = (uuid[8] & 0x3f) | 0x80;
  return uuid;
}

uint64_t CountInodes(const erofs::Tree& tree) {
  uint64_t count = 0;
  for (erofs::InodeIndex i = 0; i < tree.inode_limit(); ++i) count += tree.link_count(i) != 0;
  return count;
}

// Writes one layer blob into `output`. `import` reads the content; `identity` names what was read
// for the UUID, and is the content's own digest where there is no other.
absl::StatusOr<ConvertedLayer> WriteLayer(
    LayoutWriter& output, const ConvertOptions& options, const std::optional<Digest>& identity,
    const std::function<absl::StatusOr<erofs::Tree>(erofs::ContentSink&)>& import) {
  ASSIGN_OR_RETURN(LayoutWriter::StagedFile file, output.CreateFile());
  ASSIGN_OR_RETURN(const std::unique_ptr<chunkstore::BlobWriter> blob,
                   chunkstore::BlobWriter::Create(std::move(file.fd),
                                                  {.level = options.level, .jobs = options.jobs}));
  BlobSink sink(*blob);
  ASSIGN_OR_RETURN(const erofs::Tree tree, import(sink));
  const Digest content = blob->content_digest();
  ASSIGN_OR_RETURN(
      const std::string metadata,
      erofs::BuildImage(tree, {.devices = {{.tag = content.Hex(), .blocks = blob->blocks()}},
                               .uuid = UuidFrom(identity.value_or(content))}));
  ConvertedLayer layer{.files = CountInodes(tree)};
  ASSIGN_OR_RETURN(layer.blob, blob->Finish(AsBytes(metadata)));
  RETURN_IF_ERROR(output.AddBlob(file.path, layer.blob.digest));
  return layer;
}

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
  absl::StatusOr<ConvertedLayer> converted =
      WriteLayer(output, options, layer.diff_id,
                 [&](erofs::ContentSink& sink) { return erofs::ImportTar(read, sink); });
  if (!converted.ok()) return ExplainFailure(converted.status(), layer);
  converted->source_digest = stream->digest();
  converted->source_size = layer.content.size;
  return converted;
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

absl::StatusOr<ConvertResult> ConvertDirectory(const ConvertOptions& options,
                                               const ImageReference& reference,
                                               const ImageReference& destination) {
  ASSIGN_OR_RETURN(const std::unique_ptr<LayoutWriter> output,
                   LayoutWriter::Create(destination.path));
  ProgressMeter progress(options, 1, 0);
  progress.BeginLayer(0);
  ASSIGN_OR_RETURN(ConvertedLayer layer,
                   WriteLayer(*output, options, std::nullopt,
                              [&](erofs::ContentSink& sink) {
                                return erofs::ImportDirectory(reference.path, sink);
                              }),
                   "directory {}", reference.path);
  layer.source_digest = layer.blob.digest;
  layer.source_size = layer.blob.content_bytes;
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
                   ImageReference::ParseLayout(options.destination), "destination");
  absl::StatusOr<ConvertResult> result = source.transport == Transport::kDirectory
                                             ? ConvertDirectory(options, source, destination)
                                             : ConvertImage(options, source, destination);
  if (!result.ok()) return Annotate(result.status(), "convert " + options.source);
  return result;
}

}  // namespace lamina::fs
