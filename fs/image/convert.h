// SPDX-License-Identifier: Apache-2.0
//
// Converts an image into one of Lamina's: the same configuration, each layer as a layer blob.
#ifndef LAMINA_FS_IMAGE_CONVERT_H_
#define LAMINA_FS_IMAGE_CONVERT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "chunkstore/blob_writer.h"
#include "fs/image/image_store.h"
#include "fs/image/oci.h"
#include "fs/image/profile.h"

namespace lamina::fs {

struct ConvertOptions {
  // oci:DIR[:TAG] | oci-archive:FILE[:TAG] | docker-archive:FILE[:REF] | dir:PATH | docker://...
  std::string source;
  std::string destination;                // oci:DIR[:TAG] | docker://HOST/REPOSITORY[:TAG]
  std::optional<oci::Platform> platform;  // of the source; default: the host's
  bool all_platforms = false;             // all that there are, as an index
  // Attaches the result to the source instead of giving it a name. The destination may be empty: the
  // repository of the source.
  bool as_referrer = false;
  RegistryAccess access;
  int level = chunkstore::kDefaultLevel;
  int jobs = 0;  // 0: one for each processor
  // Frames that it names come first in their layers. It must have been recorded on a conversion of
  // this image without a profile (at any level), or Convert fails with kInvalidArgument.
  std::optional<Profile> profile;
  // Called now and then from the converting thread; may be null.
  struct Progress {
    size_t layer = 0;  // from 0
    size_t layers = 0;
    uint64_t source_bytes_read = 0;  // of all layers together
    uint64_t source_bytes = 0;       // 0 if not known
  };
  std::function<void(const Progress&)> progress;
  // Asked now and then from the same thread; true stops the conversion with kCancelled. May be null.
  std::function<bool()> cancelled;
};

struct ConvertedLayer {
  Digest source_digest;
  uint64_t source_size = 0;
  uint64_t files = 0;
  // The destination had it already, so it was neither read nor converted; of `blob`, only what a
  // descriptor has is known then.
  bool reused = false;
  chunkstore::BlobInfo blob;
};

struct ConvertResult {
  Digest manifest_digest;              // or of the index
  std::vector<ConvertedLayer> layers;  // of all platforms
};

// Checks every digest of the source (manifest, config, layers, diff_ids) on the way. The
// destination is made if missing and appears by rename; in an existing layout blobs are added and
// the tag is replaced last. On any error what was there before is untouched (a registry may be left
// with blobs that nothing refers to, which it collects).
absl::StatusOr<ConvertResult> Convert(const ConvertOptions& options);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_CONVERT_H_
