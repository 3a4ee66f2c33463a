// SPDX-License-Identifier: Apache-2.0
#include "fs/image/docker_archive.h"

#include <algorithm>
#include <charconv>

#include "chunkstore/base/json.h"
#include "fs/image/tar_index.h"

namespace lamina::fs {
namespace {

constexpr std::string_view kManifestFile = "manifest.json";

// "docker.io/library/debian" and "debian:latest" are the same image to Docker.
std::string NormalTag(std::string_view tag) {
  for (const std::string_view prefix : {"docker.io/", "library/"}) {
    if (tag.starts_with(prefix)) tag.remove_prefix(prefix.size());
  }
  const size_t name = tag.rfind('/') == std::string_view::npos ? 0 : tag.rfind('/');
  const bool has_tag = tag.find(':', name) != std::string_view::npos;
  return fmt::format("{}{}", tag, has_tag ? "" : ":latest");
}

absl::StatusOr<DockerImage> SelectImage(const std::vector<DockerImage>& images,
                                        std::string_view reference) {
  std::vector<std::string> names;
  names.reserve(images.size());
  for (const DockerImage& image : images) {
    names.push_back(image.tags.empty() ? "(one without a name)"
                                       : fmt::format("{}", fmt::join(image.tags, " = ")));
  }
  const std::string there = fmt::format("there are: {}", fmt::join(names, ", "));
  if (reference.empty()) {
    if (images.size() == 1) return images[0];
    return absl::NotFoundError(
        fmt::format("a reference is needed, as there is not just one image; {}", there));
  }
  if (reference.starts_with('@')) {
    size_t number = 0;
    const char* const end = reference.data() + reference.size();
    const auto parsed = std::from_chars(reference.data() + 1, end, number);
    if (parsed.ec == std::errc() && parsed.ptr == end && number < images.size()) {
      return images[number];
    }
  }
  for (const DockerImage& image : images) {
    const bool matches = std::any_of(image.tags.begin(), image.tags.end(), [&](const auto& tag) {
      return NormalTag(tag) == NormalTag(reference);
    });
    if (matches) return image;
  }
  return absl::NotFoundError(fmt::format("no image '{}'; {}", reference, there));
}

// The digest that a configuration's name claims: "<hex>.json" or "blobs/sha256/<hex>".
std::optional<Digest> DigestInName(std::string_view name) {
  if (const size_t slash = name.rfind('/'); slash != std::string_view::npos) {
    name.remove_prefix(slash + 1);
  }
  if (name.ends_with(".json")) name.remove_suffix(5);
  const absl::StatusOr<Digest> digest = Digest::Parse(fmt::format("sha256:{}", name));
  return digest.ok() ? std::optional(*digest) : std::nullopt;
}

absl::StatusOr<std::string> ReadMember(const TarIndex& archive, std::string_view name) {
  ASSIGN_OR_RETURN(const ByteRange member, archive.Find(name));
  ASSIGN_OR_RETURN(std::string text, member.ReadAll(oci::kMaxDocumentSize), "{}", name);
  return text;
}

absl::StatusOr<SourceImage> ReadImage(const TarIndex& archive, const DockerImage& image) {
  SourceImage source;
  ASSIGN_OR_RETURN(source.config_json, ReadMember(archive, image.config));
  const std::optional<Digest> expected = DigestInName(image.config);
  const Digest actual = Digest::Of(AsBytes(source.config_json));
  if (expected && *expected != actual) {
    return absl::DataLossError(
        fmt::format("image configuration: digest mismatch: {} was expected, the content has {}",
                    expected->ToString(), actual.ToString()));
  }
  ASSIGN_OR_RETURN(source.config, oci::ImageConfig::Parse(source.config_json));
  if (source.config.diff_ids.size() != image.layers.size()) {
    return absl::InvalidArgumentError(fmt::format("{} has {} layers, the image configuration {}",
                                                  kManifestFile, image.layers.size(),
                                                  source.config.diff_ids.size()));
  }
  for (size_t i = 0; i < image.layers.size(); ++i) {
    ASSIGN_OR_RETURN(ByteRange content, archive.Find(image.layers[i]), "layer {}", i);
    source.layers.push_back({std::move(content), std::nullopt, source.config.diff_ids[i]});
  }
  return source;
}

}  // namespace

absl::StatusOr<std::vector<DockerImage>> ParseDockerManifest(std::string_view json) {
  ASSIGN_OR_RETURN(const nlohmann::json value, oci::ParseJson(json, kManifestFile));
  ASSIGN_OR_RETURN(const std::vector<oci::Field> entries,
                   oci::Field(value, kManifestFile).Elements());
  std::vector<DockerImage> images;
  for (const oci::Field& entry : entries) {
    DockerImage image;
    ASSIGN_OR_RETURN(const oci::Field config, entry.Get("Config"));
    ASSIGN_OR_RETURN(image.config, config.String());
    ASSIGN_OR_RETURN(image.layers, entry.OptionalStrings("Layers"));
    ASSIGN_OR_RETURN(image.tags, entry.OptionalStrings("RepoTags"));
    if (image.layers.size() > oci::kMaxLayers) {
      return entry.Error(fmt::format("{} layers, more than the {} that overlayfs can stack",
                                     image.layers.size(), oci::kMaxLayers));
    }
    images.push_back(std::move(image));
  }
  return images;
}

absl::StatusOr<SourceImage> OpenDockerArchive(const std::string& file, std::string_view reference) {
  const std::string context = "docker archive " + file;
  ASSIGN_OR_RETURN(const TarIndex archive, TarIndex::Open(file), "{}", context);
  ASSIGN_OR_RETURN(const std::string json, ReadMember(archive, kManifestFile), "{}", context);
  ASSIGN_OR_RETURN(const std::vector<DockerImage> images, ParseDockerManifest(json), "{}", context);
  ASSIGN_OR_RETURN(const DockerImage image, SelectImage(images, reference), "{}", context);
  ASSIGN_OR_RETURN(SourceImage source, ReadImage(archive, image), "{}", context);
  return source;
}

}  // namespace lamina::fs
