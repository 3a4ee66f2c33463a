// SPDX-License-Identifier: Apache-2.0
//
// The parts of the OCI image specification (v1.1) and of Docker's image manifest v2.2 that Lamina
// reads and writes. Documents come from outside: parsing checks types, digests and sizes, and
// errors name the field ("manifest: layers[3].size: not a number").
#ifndef LAMINA_FS_IMAGE_OCI_H_
#define LAMINA_FS_IMAGE_OCI_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"
#include "chunkstore/blob_tables.h"

namespace lamina::oci {

inline constexpr std::string_view kIndexType = "application/vnd.oci.image.index.v1+json";
inline constexpr std::string_view kManifestType = "application/vnd.oci.image.manifest.v1+json";
inline constexpr std::string_view kConfigType = "application/vnd.oci.image.config.v1+json";
inline constexpr std::string_view kDockerIndexType =
    "application/vnd.docker.distribution.manifest.list.v2+json";
inline constexpr std::string_view kDockerManifestType =
    "application/vnd.docker.distribution.manifest.v2+json";
inline constexpr std::string_view kDockerConfigType =
    "application/vnd.docker.container.image.v1+json";
// A layer blob of Lamina (chunkstore/FORMAT.md). containerd takes for a layer only what begins like
// this (its images.IsLayerType); anything else it downloads, and does not unpack.
inline constexpr std::string_view kLaminaLayerType = "application/vnd.oci.image.layer.lamina.v1";

// Annotations of a Lamina layer. The prefix makes containerd pass them to the snapshotter as
// labels.
inline constexpr std::string_view kSectionTableOffsetKey =
    "containerd.io/snapshot/lamina.section-table.offset";
inline constexpr std::string_view kSectionTableDigestKey =
    "containerd.io/snapshot/lamina.section-table.digest";
// Of a layer that was laid out by a profile: so many frames at its beginning are what a start reads.
inline constexpr std::string_view kHotFramesKey = "containerd.io/snapshot/lamina.hot-frames";
// Artifact type of a converted image that is attached to the original (by "subject").
inline constexpr std::string_view kLaminaImageType = "application/vnd.lamina.image.v1";

// Digest of the layer that was converted, as its manifest had it.
inline constexpr std::string_view kSourceDigestKey = "containerd.io/snapshot/lamina.source-digest";
// What decides how a layer is converted besides its content: equal values give equal bytes.
inline constexpr std::string_view kConverterKey = "containerd.io/snapshot/lamina.converter";
// When something was made (RFC 3339), image-spec annotations.md.
inline constexpr std::string_view kCreatedKey = "org.opencontainers.image.created";
// The configuration of what has none, `{}` (image-spec manifest.md, "Guidance for an Empty
// Descriptor").
inline constexpr std::string_view kEmptyType = "application/vnd.oci.empty.v1+json";
inline constexpr std::string_view kEmptyContent = "{}";
// Name of a manifest in an index.json ("tag"), image-spec annotations.md.
inline constexpr std::string_view kRefNameKey = "org.opencontainers.image.ref.name";

// Layers of an image, at most: overlayfs stacks no more (OVL_MAX_STACK in Linux' fs/overlayfs).
inline constexpr size_t kMaxLayers = 500;

struct Platform {
  std::string os = "linux";
  std::string architecture;
  std::string variant;

  // "linux/amd64", "linux/arm64/v8".
  static absl::StatusOr<Platform> Parse(std::string_view text);
  static Platform Host();
  std::string ToString() const;
  // An empty variant, on either side, matches any.
  bool Matches(const Platform& other) const;
};

struct Descriptor {
  std::string media_type;
  Digest digest;
  uint64_t size = 0;
  std::map<std::string, std::string> annotations;
  std::optional<Platform> platform;
  std::string artifact_type;  // empty: none

  // A Lamina layer's, from its annotations; kFailedPrecondition if it is not one.
  absl::StatusOr<chunkstore::LayerDescriptor> ToLayerDescriptor() const;
  // By its annotation; 0 if it has none, or none that can be. It may be more than the blob has.
  uint32_t HotFrames() const;
};

struct Manifest {
  std::string media_type;  // kManifestType or kDockerManifestType
  Descriptor config;
  std::vector<Descriptor> layers;  // lowest first
  std::map<std::string, std::string> annotations;
  std::string artifact_type;          // empty: none
  std::optional<Descriptor> subject;  // what it is attached to

  static absl::StatusOr<Manifest> Parse(std::string_view json);
  // Canonical: equal manifests give equal bytes.
  std::string ToJson() const;
};

// An index of images, or Docker's manifest list.
struct Index {
  std::vector<Descriptor> manifests;
  std::map<std::string, std::string> annotations;

  static absl::StatusOr<Index> Parse(std::string_view json);
  std::string ToJson() const;
};

// What a document says that it is: the media type of a manifest or an index. kUnimplemented if it is
// something else, or does not say.
absl::StatusOr<std::string> DocumentType(std::string_view json);
bool IsManifestOrIndex(std::string_view media_type);

// `index_json` with `manifest` in it, instead of what has the same name (annotation kRefNameKey;
// having none is a name too), and of what is in `superseded`. All else in the index stays, fields
// that Lamina does not know included. What has an artifact type is attached to an image and has no
// name: it replaces nothing by name, and is not replaced.
absl::StatusOr<std::string> ReplaceInIndex(std::string_view index_json, const Descriptor& manifest,
                                           const std::set<Digest>& superseded = {});

// What running an image needs of its configuration.
struct ImageConfig {
  Platform platform;
  std::vector<Digest> diff_ids;  // of the uncompressed layers, lowest first
  std::vector<std::string> entrypoint;
  std::vector<std::string> command;
  std::vector<std::string> environment;  // "NAME=value"
  std::string working_directory;
  std::string user;  // "name", "uid", "name:group", "uid:gid" or empty

  static absl::StatusOr<ImageConfig> Parse(std::string_view json);
};

}  // namespace lamina::oci

#endif  // LAMINA_FS_IMAGE_OCI_H_
