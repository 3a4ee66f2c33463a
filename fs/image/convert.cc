// SPDX-License-Identifier: Apache-2.0
#include "fs/image/convert.h"

#include <sys/stat.h>
#include <zstd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <tuple>

#include "erofs/import.h"
#include "fs/image/image_document.h"
#include "fs/image/image_writer.h"
#include "fs/image/layer_stream.h"
#include "fs/image/layer_writer.h"
#include "fs/image/reference.h"
#include "fs/image/source.h"

namespace lamina::fs {
namespace {

namespace stdfs = std::filesystem;
using Clock = std::chrono::steady_clock;
constexpr int kLayerAttempts = 3;
constexpr Clock::duration kProgressInterval = std::chrono::milliseconds(100);

const Profile* ProfileOf(const ConvertOptions& options) {
  return options.profile ? &*options.profile : nullptr;
}

// What decides how a layer is converted besides its content.
std::string ConverterOf(const ConvertOptions& options) {
  std::string converter = fmt::format("1 zstd-{} level-{}", ZSTD_versionString(), options.level);
  if (options.profile) {
    converter += " profile-" + Digest::Of(AsBytes(options.profile->ToJson())).Hex();
  }
  return converter;
}

// A profile that fits nothing is not what the user meant.
absl::Status CheckProfileUsed(const ConvertOptions& options,
                              const std::vector<ConvertedLayer>& layers) {
  const auto used = [](const ConvertedLayer& layer) {
    return layer.blob.hot_frames > 0 || layer.reused;
  };
  if (!options.profile || std::ranges::any_of(layers, used)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "the profile names nothing of this image: it must have been recorded on it, converted "
      "without a profile");
}

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

absl::Status CheckNotCancelled(const ConvertOptions& options) {
  if (!options.cancelled || !options.cancelled()) return absl::OkStatus();
  return absl::CancelledError("stopped; nothing was written");
}

// Tells how much of a directory has been read. Its size is not known in advance.
class ProgressSink : public erofs::ContentSink {
 public:
  ProgressSink(erofs::ContentSink& sink, const ConvertOptions& options, ProgressMeter& progress)
      : sink_(sink), options_(options), progress_(progress) {}

  absl::Status BeginFile(uint64_t size) override { return sink_.BeginFile(size); }
  absl::Status Append(std::span<const std::byte> data) override {
    RETURN_IF_ERROR(CheckNotCancelled(options_));
    bytes_ += data.size();
    progress_.Update(bytes_);
    return sink_.Append(data);
  }
  absl::Status AppendHole(uint64_t length) override { return sink_.AppendHole(length); }
  absl::StatusOr<std::vector<erofs::Extent>> EndFile() override { return sink_.EndFile(); }

 private:
  erofs::ContentSink& sink_;
  const ConvertOptions& options_;
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

absl::StatusOr<ConvertedLayer> ConvertLayer(ImageWriter& output, const ConvertOptions& options,
                                            const SourceLayer& layer, ProgressMeter& progress) {
  ASSIGN_OR_RETURN(const std::unique_ptr<LayerStream> stream,
                   LayerStream::Open(layer.content, layer.digest, layer.diff_id));
  const auto read = [&](std::span<std::byte> into) -> absl::StatusOr<size_t> {
    RETURN_IF_ERROR(CheckNotCancelled(options));
    progress.Update(stream->source_bytes_read());
    return stream->Read(into);
  };
  absl::StatusOr<WrittenLayer> written = WriteLayer(
      output, BlobOptions(options), layer.diff_id,
      [&](erofs::ContentSink& sink) { return erofs::ImportTar(read, sink); }, ProfileOf(options));
  if (!written.ok()) return ExplainFailure(written.status(), layer);
  return ConvertedLayer{.source_digest = stream->digest(),
                        .source_size = layer.content.size,
                        .files = written->inodes,
                        .blob = written->blob};
}

// Converts the images of one source, which may share layers.
class ImageConverter {
 public:
  ImageConverter(ImageWriter& output, const ConvertOptions& options,
                 const std::vector<SourceImage>& images)
      : output_(output),
        options_(options),
        converter_(ConverterOf(options)),
        reusable_(output.FindConverted(Digests(images), converter_)),
        progress_(options, CountLayers(images), CountBytes(images)) {}

  absl::StatusOr<ImageDocument> Convert(const SourceImage& image) {
    std::vector<oci::Descriptor> descriptors;
    for (size_t i = 0; i < image.layers.size(); ++i) {
      const SourceLayer& layer = image.layers[i];
      ASSIGN_OR_RETURN(const ConvertedLayer converted, ConvertOnce(layer), "layer {} ({})", i,
                       layer.digest.value_or(layer.diff_id).ToString());
      ++layers_begun_;
      layers_.push_back(converted);
      descriptors.push_back(DescribeLayer(converted.blob));
      auto& annotations = descriptors.back().annotations;
      annotations[std::string(oci::kSourceDigestKey)] = converted.source_digest.ToString();
      annotations[std::string(oci::kConverterKey)] = converter_;
    }
    progress_.Call();
    std::optional<oci::Descriptor> subject;
    if (options_.as_referrer) subject = image.manifest;
    return MakeManifest(output_, image.config_json, image.config.platform, std::move(descriptors),
                        image.annotations, subject);
  }

  std::vector<ConvertedLayer> TakeLayers() { return std::move(layers_); }

 private:
  // Some images have a layer twice. It is equal only if every digest it is checked against is.
  using Key = std::tuple<std::optional<Digest>, uint64_t, Digest>;
  static Key KeyOf(const SourceLayer& layer) {
    return Key(layer.digest, layer.content.offset, layer.diff_id);
  }

  static std::set<Digest> Digests(const std::vector<SourceImage>& images) {
    std::set<Digest> digests;
    for (const SourceImage& image : images) {
      for (const SourceLayer& layer : image.layers) {
        if (layer.digest) digests.insert(*layer.digest);
      }
    }
    return digests;
  }
  static size_t CountLayers(const std::vector<SourceImage>& images) {
    size_t layers = 0;
    for (const SourceImage& image : images) layers += image.layers.size();
    return layers;
  }
  uint64_t CountBytes(const std::vector<SourceImage>& images) const {
    std::map<Key, uint64_t> sizes;
    for (const SourceImage& image : images) {
      for (const SourceLayer& layer : image.layers) {
        if (!FindReusable(layer)) sizes[KeyOf(layer)] = layer.content.size;
      }
    }
    uint64_t bytes = 0;
    for (const auto& [key, size] : sizes) bytes += size;
    return bytes;
  }

  const oci::Descriptor* FindReusable(const SourceLayer& layer) const {
    if (!layer.digest) return nullptr;
    const auto found = reusable_.find(*layer.digest);
    return found == reusable_.end() ? nullptr : &found->second;
  }

  absl::StatusOr<ConvertedLayer> ConvertOnce(const SourceLayer& layer) {
    const auto done = converted_.find(KeyOf(layer));
    if (done != converted_.end()) return done->second;
    ConvertedLayer converted;
    if (const oci::Descriptor* reusable = FindReusable(layer)) {
      ASSIGN_OR_RETURN(const chunkstore::LayerDescriptor blob, reusable->ToLayerDescriptor());
      converted = {.source_digest = *layer.digest,
                   .source_size = layer.content.size,
                   .reused = true,
                   .blob = {.digest = blob.digest,
                            .size = blob.size,
                            .section_table_offset = blob.section_table_offset,
                            .section_table_digest = blob.section_table_digest,
                            .hot_frames = reusable->HotFrames()}};
    } else {
      progress_.BeginLayer(layers_begun_);
      absl::StatusOr<ConvertedLayer> made = ConvertLayer(output_, options_, layer, progress_);
      // A destination that lost a part of an upload gets all of it again.
      for (int attempt = 1; absl::IsAborted(made.status()) && attempt < kLayerAttempts; ++attempt) {
        made = ConvertLayer(output_, options_, layer, progress_);
      }
      ASSIGN_OR_RETURN(converted, std::move(made));
      progress_.Update(layer.content.size);
    }
    converted_.emplace(KeyOf(layer), converted);
    return converted;
  }

  ImageWriter& output_;
  const ConvertOptions& options_;
  const std::string converter_;
  const std::map<Digest, oci::Descriptor> reusable_;
  ProgressMeter progress_;
  size_t layers_begun_ = 0;
  std::map<Key, ConvertedLayer> converted_;
  std::vector<ConvertedLayer> layers_;
};

// The images to convert: one, or those for all platforms.
absl::StatusOr<std::vector<SourceImage>> OpenSources(const ConvertOptions& options,
                                                     const ImageReference& reference) {
  std::vector<SourceImage> images;
  if (!options.all_platforms) {
    ASSIGN_OR_RETURN(SourceImage image, OpenSource(reference, options.platform, options.access));
    images.push_back(std::move(image));
    return images;
  }
  ASSIGN_OR_RETURN(const OpenedStore opened, OpenStore(reference, options.access));
  ASSIGN_OR_RETURN(std::vector<oci::Descriptor> entries, opened.store->Find(opened.name));
  ASSIGN_OR_RETURN(std::vector<oci::Descriptor> manifests,
                   CollectManifests(*opened.store, std::move(entries)));
  std::set<std::pair<Digest, std::string>> seen;
  for (const oci::Descriptor& manifest : manifests) {
    const std::string platform = manifest.platform ? manifest.platform->ToString() : "";
    if (!seen.emplace(manifest.digest, platform).second) continue;
    ASSIGN_OR_RETURN(SourceImage image, ReadSource(*opened.store, manifest), "{}",
                     platform.empty() ? "image" : platform);
    // The index may know more of the platform (a variant) than the configuration.
    if (manifest.platform) image.config.platform = *manifest.platform;
    images.push_back(std::move(image));
  }
  if (images.empty()) return absl::NotFoundError("there is no image in it");
  return images;
}

// Makes what was converted visible, and returns its digest.
absl::StatusOr<Digest> Publish(ImageWriter& output, const ConvertOptions& options,
                               const std::vector<SourceImage>& images,
                               const std::vector<ImageDocument>& manifests) {
  if (options.as_referrer) {
    for (size_t i = 0; i < manifests.size(); ++i) {
      RETURN_IF_ERROR(
          output.Attach(manifests[i].descriptor, images[i].manifest.digest, manifests[i].content));
    }
    return manifests[0].descriptor.digest;
  }
  if (!options.all_platforms) {
    RETURN_IF_ERROR(output.CommitImage(manifests[0].descriptor, manifests[0].content));
    return manifests[0].descriptor.digest;
  }
  oci::Index index;
  for (const ImageDocument& manifest : manifests) {
    RETURN_IF_ERROR(output.AddManifest(manifest.descriptor, manifest.content));
    index.manifests.push_back(manifest.descriptor);
  }
  const ImageDocument made = MakeDocument(oci::kIndexType, index.ToJson());
  RETURN_IF_ERROR(output.CommitImage(made.descriptor, made.content));
  return made.descriptor.digest;
}

absl::StatusOr<ConvertResult> ConvertImage(const ConvertOptions& options,
                                           const ImageReference& reference,
                                           const ImageReference& destination) {
  ASSIGN_OR_RETURN(const std::vector<SourceImage> images, OpenSources(options, reference));
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageWriter> output,
                   OpenWriter(destination, options.access, &reference));
  ImageConverter converter(*output, options, images);
  std::vector<ImageDocument> manifests;
  for (const SourceImage& image : images) {
    ASSIGN_OR_RETURN(ImageDocument made, converter.Convert(image));
    manifests.push_back(std::move(made));
  }
  ConvertResult result;
  result.layers = converter.TakeLayers();
  RETURN_IF_ERROR(CheckProfileUsed(options, result.layers));
  ASSIGN_OR_RETURN(result.manifest_digest, Publish(*output, options, images, manifests));
  return result;
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

// What is attached lies in the repository of what it is attached to.
absl::Status CheckMayAttach(const ImageReference& source, const ImageReference& destination) {
  const bool possible = destination.transport == ImageTransport::kRegistry &&
                        source.transport != ImageTransport::kDirectory &&
                        source.transport != ImageTransport::kDockerArchive;
  if (possible) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a referrer is attached to an image in a registry, docker://HOST/REPOSITORY");
}

absl::StatusOr<ConvertResult> ConvertDirectory(const ConvertOptions& options,
                                               const ImageReference& reference,
                                               const ImageReference& destination) {
  if (destination.transport == ImageTransport::kOciLayout) {
    RETURN_IF_ERROR(CheckIsOutside(destination.path, reference.path));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageWriter> output,
                   OpenWriter(destination, options.access, nullptr));
  ProgressMeter progress(options, 1, 0);
  progress.BeginLayer(0);
  ASSIGN_OR_RETURN(const WrittenLayer written,
                   WriteLayer(
                       *output, BlobOptions(options), std::nullopt,
                       [&](erofs::ContentSink& sink) {
                         ProgressSink counted(sink, options, progress);
                         return erofs::ImportDirectory(reference.path, counted);
                       },
                       ProfileOf(options)),
                   "directory {}", reference.path);
  const ConvertedLayer layer{.source_digest = written.blob.digest,
                             .source_size = written.blob.content_bytes,
                             .files = written.inodes,
                             .blob = written.blob};
  RETURN_IF_ERROR(CheckProfileUsed(options, {layer}));
  progress.Update(layer.source_size);

  const oci::Platform platform = options.platform.value_or(oci::Platform::Host());
  // Nothing in it but what the content and platform say, so that it is reproducible.
  ASSIGN_OR_RETURN(const std::string config,
                   AddLayers(EmptyConfig(platform), {{.diff_id = layer.blob.digest,
                                                      .created_by = "lamina convert dir:"}}));
  ASSIGN_OR_RETURN(
      const ImageDocument made,
      MakeManifest(*output, config, platform, {DescribeLayer(layer.blob)}, {}, std::nullopt));
  RETURN_IF_ERROR(output->CommitImage(made.descriptor, made.content));
  ConvertResult result{.manifest_digest = made.descriptor.digest};
  result.layers.push_back(layer);
  progress.Call();
  return result;
}

}  // namespace

absl::StatusOr<ConvertResult> Convert(const ConvertOptions& given) {
  ConvertOptions options = given;
  ASSIGN_OR_RETURN(const ImageReference source, ImageReference::Parse(options.source));
  if (options.as_referrer && options.destination.empty()) options.destination = options.source;
  ASSIGN_OR_RETURN(ImageReference destination, ImageReference::ParseConverted(options.destination),
                   "destination");
  if (options.as_referrer) {
    RETURN_IF_ERROR(CheckMayAttach(source, destination));
    destination.path = destination.path.substr(0, destination.path.find('@'));
  }
  const bool single = source.transport == ImageTransport::kDirectory ||
                      source.transport == ImageTransport::kDockerArchive;
  if (options.all_platforms && single) {
    return absl::InvalidArgumentError(options.source + ": is for one platform only");
  }
  if (options.access.client == nullptr && (source.transport == ImageTransport::kRegistry ||
                                           destination.transport == ImageTransport::kRegistry)) {
    ASSIGN_OR_RETURN(options.access.client, http::Client::Create());
  }
  absl::StatusOr<ConvertResult> result = source.transport == ImageTransport::kDirectory
                                             ? ConvertDirectory(options, source, destination)
                                             : ConvertImage(options, source, destination);
  if (!result.ok()) return Annotate(result.status(), "convert " + options.source);
  return result;
}

}  // namespace lamina::fs
