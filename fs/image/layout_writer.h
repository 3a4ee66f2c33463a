// SPDX-License-Identifier: Apache-2.0
//
// Adds an image to an OCI image layout, so that other readers and writers of the layout see all of
// it or nothing. Everything is first written to a staging directory on the same file system. Commit
// renames a new layout into place whole; into one that exists it moves the blobs, then replaces
// index.json, with a lock on the oci-layout file held.
#ifndef LAMINA_FS_IMAGE_LAYOUT_WRITER_H_
#define LAMINA_FS_IMAGE_LAYOUT_WRITER_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "chunkstore/base/file.h"
#include "fs/image/image_writer.h"
#include "fs/image/oci.h"

namespace lamina::fs {

// Names of staging directories start with this. One that a killed process left behind is removed by
// the next writer to the same layout; one in use is recognised by the lock on a file in it.
inline constexpr std::string_view kStagingPrefix = ".lamina-tmp-";

// Used by one thread.
class LayoutWriter : public ImageWriter {
 public:
  // Fails if `directory` exists and is neither a layout nor empty.
  // CommitImage gives the image this tag; empty: none.
  static absl::StatusOr<std::unique_ptr<LayoutWriter>> Create(std::string directory,
                                                              std::string tag = "");
  // Removes what was staged and not committed.
  ~LayoutWriter() override = default;

  absl::StatusOr<std::unique_ptr<chunkstore::BlobOutput>> NewBlob() override;
  absl::StatusOr<Transfer> AddFrom(const ImageStore& store, const oci::Descriptor& blob) override;
  absl::Status AddBlob(std::string_view content) override { return AddDocument(content); }
  absl::Status AddManifest(const oci::Descriptor&, std::string_view content) override {
    return AddDocument(content);
  }
  absl::Status CommitImage(const oci::Descriptor& descriptor, std::string_view content) override;
  // In place of what of its artifact type is attached. Not for images: other readers of layouts would
  // not find them.
  absl::Status Attach(const oci::Descriptor& descriptor, const Digest& subject,
                      std::string_view content) override;
  // Everything is written again, which mends what is damaged.
  std::map<Digest, oci::Descriptor> FindConverted(const std::set<Digest>&,
                                                  std::string_view) override {
    return {};
  }

  // An empty file to write a blob to, which AddBlob later takes under its digest.
  struct StagedFile {
    UniqueFd fd;
    std::string path;
  };
  absl::StatusOr<StagedFile> CreateFile();
  // `path` is a staged file, complete and synced.
  absl::Status AddBlob(const std::string& path, const Digest& digest);
  // A document, written and added.
  absl::Status AddDocument(std::string_view content);

  // Makes the image visible under its name (annotation kRefNameKey of `manifest`), in place of what
  // had that name, or with an artifact type, of what is in `superseded`. On failure the layout is as
  // it was before.
  absl::Status Commit(const oci::Descriptor& manifest, const std::set<Digest>& superseded = {});

 private:
  struct Staging {
    UniqueFd lock;  // held until the directory is gone
    TemporaryDirectory directory;
  };
  static absl::StatusOr<Staging> CreateStaging(const std::string& parent);

  class Blob;
  LayoutWriter(std::string directory, std::string tag, Staging staging, bool exists);

  absl::Status CommitNew(const oci::Descriptor& manifest, const std::set<Digest>& superseded);
  absl::Status CommitInto(const oci::Descriptor& manifest, const std::set<Digest>& superseded);

  const std::string directory_;
  const std::string tag_;
  const bool exists_;
  Staging staging_;
  const std::string layout_;  // in the staging directory: a layout in the making
  int files_ = 0;
  std::set<Digest> blobs_;
  std::map<Digest, uint64_t> found_;  // blobs that were in the layout already, and their sizes
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_LAYOUT_WRITER_H_
