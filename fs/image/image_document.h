// SPDX-License-Identifier: Apache-2.0
//
// The documents of images that are made here: manifests, configurations, and what they say.
#ifndef LAMINA_FS_IMAGE_IMAGE_DOCUMENT_H_
#define LAMINA_FS_IMAGE_IMAGE_DOCUMENT_H_

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/blob_writer.h"
#include "fs/image/image_writer.h"
#include "fs/image/oci.h"

namespace lamina::fs {

// A manifest or index that is made but not written yet.
struct ImageDocument {
  oci::Descriptor descriptor;
  std::string content;
};
ImageDocument MakeDocument(std::string_view type, std::string content);

// Writes the configuration and makes the manifest. With a subject, it is attached to that.
absl::StatusOr<ImageDocument> MakeManifest(ImageWriter& output, const std::string& config_json,
                                           const oci::Platform& platform,
                                           std::vector<oci::Descriptor> layers,
                                           std::map<std::string, std::string> annotations,
                                           const std::optional<oci::Descriptor>& subject);

// Of a layer blob in a manifest.
oci::Descriptor DescribeLayer(const chunkstore::BlobInfo& blob);

// A configuration that says no more than what the platform is, and that there are no layers yet.
std::string EmptyConfig(const oci::Platform& platform);

// A layer as the configuration has it. There may be no archive whose digest could be the diff_id; the
// layer blob's own stands in then.
struct LayerHistory {
  Digest diff_id;
  std::string created_by;
  std::string created;  // RFC 3339, or empty
  std::string comment;  // may be empty
};
// `config_json` with further layers on top; all else in it stays.
absl::StatusOr<std::string> AddLayers(std::string_view config_json,
                                      const std::vector<LayerHistory>& layers);

// The time, as documents have it (RFC 3339, in whole seconds).
std::string TimestampNow();

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_IMAGE_DOCUMENT_H_
