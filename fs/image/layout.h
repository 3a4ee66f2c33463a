// SPDX-License-Identifier: Apache-2.0
//
// Reads an OCI image layout (image-spec, image-layout.md), in a directory or inside a tar archive.
// Every path comes from a digest, so nothing in a layout can lead outside of it, and every document
// is checked against its descriptor before it is parsed.
#ifndef LAMINA_FS_IMAGE_LAYOUT_H_
#define LAMINA_FS_IMAGE_LAYOUT_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fs/image/image_store.h"
#include "fs/image/oci.h"
#include "fs/image/tar_index.h"

namespace lamina::fs {

// Names inside a layout.
inline constexpr std::string_view kLayoutFile = "oci-layout";
inline constexpr std::string_view kIndexFile = "index.json";
inline constexpr std::string_view kBlobsDirectory = "blobs/sha256";
// Content of the oci-layout file that we write.
inline constexpr std::string_view kLayoutFileContent = "{\"imageLayoutVersion\":\"1.0.0\"}";

// Fails unless it is the content of an oci-layout file of a version we know.
absl::Status CheckLayoutFile(std::string_view json);

// Immutable; any number of threads.
class Layout : public ImageStore {
 public:
  static absl::StatusOr<Layout> OpenDirectory(const std::string& directory);
  static absl::StatusOr<Layout> OpenArchive(const std::string& file);

  const std::string& name() const override { return path_; }
  absl::StatusOr<std::vector<oci::Descriptor>> Find(std::string_view tag) const override;
  absl::StatusOr<std::string> ReadDocument(const oci::Descriptor& descriptor,
                                           std::string_view what) const override;
  absl::StatusOr<ByteRange> OpenBlob(const oci::Descriptor& descriptor) const override;
  std::string FileOf(const Digest& digest) const override;
  absl::StatusOr<std::shared_ptr<chunkstore::Origin>> OpenOrigin() const override;
  absl::StatusOr<std::vector<oci::Descriptor>> FindReferrers(
      const Digest& subject, std::string_view artifact_type) const override;

 private:
  Layout(std::string path, std::optional<TarIndex> archive)
      : path_(std::move(path)), archive_(std::move(archive)) {}

  absl::Status ReadIndex();
  absl::StatusOr<oci::Descriptor> FindByDigest(const Digest& digest) const;
  absl::StatusOr<ByteRange> OpenFile(std::string_view name) const;

  std::string path_;
  std::optional<TarIndex> archive_;
  oci::Index index_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_LAYOUT_H_
