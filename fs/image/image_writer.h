// SPDX-License-Identifier: Apache-2.0
//
// A place that an image is written to: an OCI layout, or a repository in a registry. Whatever makes
// images knows places through this interface alone.
#ifndef LAMINA_FS_IMAGE_IMAGE_WRITER_H_
#define LAMINA_FS_IMAGE_IMAGE_WRITER_H_

#include <map>
#include <memory>
#include <set>
#include <string_view>

#include "chunkstore/blob_output.h"
#include "fs/image/image_store.h"
#include "fs/image/oci.h"
#include "fs/image/reference.h"

namespace lamina::fs {

// What it took to make a blob of one place a part of another.
enum class Transfer {
  kThere,    // nothing: it was there
  kLinked,   // another name for the file
  kMounted,  // the registry has it in another repository
  kCopied,
};

// Used by one thread. Nobody sees anything of the image before Commit or Attach: until then it has no
// name.
class ImageWriter {
 public:
  virtual ~ImageWriter() = default;

  // A new blob. It is a part of the place once its Finish has succeeded.
  virtual absl::StatusOr<std::unique_ptr<chunkstore::BlobOutput>> NewBlob() = 0;
  // A blob of another place, in the way that takes least. Only what is copied is checked against its
  // digest; whoever reads the rest does so. kAborted as Finish of NewBlob's.
  virtual absl::StatusOr<Transfer> AddFrom(const ImageStore& store,
                                           const oci::Descriptor& blob) = 0;
  // A small blob, whole.
  virtual absl::Status AddBlob(std::string_view content) = 0;
  // A manifest or index that another document will refer to.
  virtual absl::Status AddManifest(const oci::Descriptor& descriptor, std::string_view content) = 0;
  // The image's manifest or index, under the name that the place was opened with.
  virtual absl::Status CommitImage(const oci::Descriptor& descriptor, std::string_view content) = 0;
  // A manifest that has no name of its own: it is found by its "subject", whose digest this is.
  // kUnimplemented where that cannot be.
  virtual absl::Status Attach(const oci::Descriptor& descriptor, const Digest& subject,
                              std::string_view content) = 0;

  // Layers of Lamina that are there already and were made from one of `sources`, by the annotation
  // kSourceDigestKey, with the same kConverterKey. Not finding one is no error.
  virtual std::map<Digest, oci::Descriptor> FindConverted(const std::set<Digest>& sources,
                                                          std::string_view converter) = 0;
};

// Copies a blob into a new one, and checks its digest: for implementations of AddFrom.
absl::Status CopyBlob(const ImageStore& store, const oci::Descriptor& blob,
                      chunkstore::BlobOutput& output);

// For an OCI layout or a registry. `source` is where the image comes from, if it is in a registry:
// what the same registry has need not be sent to it again.
absl::StatusOr<std::unique_ptr<ImageWriter>> OpenWriter(const ImageReference& destination,
                                                        const RegistryAccess& access,
                                                        const ImageReference* source);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_IMAGE_WRITER_H_
