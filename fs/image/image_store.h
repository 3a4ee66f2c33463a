// SPDX-License-Identifier: Apache-2.0
//
// A place that images are read from: an OCI layout, the archive of one, a repository in a registry.
// Whatever reads images knows places through this interface alone.
#ifndef LAMINA_FS_IMAGE_IMAGE_STORE_H_
#define LAMINA_FS_IMAGE_IMAGE_STORE_H_

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/http/client.h"
#include "chunkstore/origin.h"
#include "chunkstore/registry/settings.h"
#include "fs/image/byte_range.h"
#include "fs/image/oci.h"
#include "fs/image/reference.h"

namespace lamina::fs {

// How registries are reached. Holds secrets (registry/credentials.h).
struct RegistryAccess {
  registry::Settings settings;
  std::shared_ptr<http::Client> client;  // null: one is made when it is needed
};

// To be called before images are read or written together: credentials that were given without a host
// are for the registry of them all, and kInvalidArgument says that there are several.
absl::Status CheckCredentials(std::span<const std::string> references,
                              const registry::Settings& settings);

// Any number of threads. Documents are checked against their descriptors before they are returned.
class ImageStore {
 public:
  virtual ~ImageStore() = default;

  // How errors name it.
  virtual const std::string& name() const = 0;
  // The manifests and indexes that go by this name: a tag, the digest of a manifest (also one that has
  // no tag, or none any more), or empty for what is there if there is but one. kNotFound says what
  // there is instead.
  virtual absl::StatusOr<std::vector<oci::Descriptor>> Find(std::string_view name) const = 0;
  // A manifest, index or configuration. `what` names it in errors.
  virtual absl::StatusOr<std::string> ReadDocument(const oci::Descriptor& descriptor,
                                                   std::string_view what) const = 0;
  // A blob for reading in place: its size is checked, its digest is not. kNotFound if it is missing.
  virtual absl::StatusOr<ByteRange> OpenBlob(const oci::Descriptor& descriptor) const = 0;
  // The file that holds a blob and nothing else; empty where there is none.
  virtual std::string FileOf(const Digest&) const { return ""; }
  // For reading blobs in parts. kUnimplemented where that is not to be had (archives).
  virtual absl::StatusOr<std::shared_ptr<chunkstore::Origin>> OpenOrigin() const = 0;
  // What is attached to a manifest (by "subject") and has this artifact type, oldest first.
  virtual absl::StatusOr<std::vector<oci::Descriptor>> FindReferrers(
      const Digest& subject, std::string_view artifact_type) const = 0;
};

// The store of a reference that is neither docker-archive: nor dir:. `name` is what its Find takes.
struct OpenedStore {
  std::unique_ptr<ImageStore> store;
  std::string name;
};
absl::StatusOr<OpenedStore> OpenStore(const ImageReference& reference,
                                      const RegistryAccess& access);

// All image manifests below `entries`, whose indexes may refer to indexes.
absl::StatusOr<std::vector<oci::Descriptor>> CollectManifests(const ImageStore& store,
                                                              std::vector<oci::Descriptor> entries);

// The manifest that `name` stands for. Where an image is for several platforms, `platform` decides; a
// manifest for which no platform is given fits any. An image for one platform is taken as it is.
absl::StatusOr<oci::Descriptor> FindManifest(const ImageStore& store, std::string_view name,
                                             const oci::Platform& platform);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_IMAGE_STORE_H_
