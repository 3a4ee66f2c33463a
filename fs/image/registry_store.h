// SPDX-License-Identifier: Apache-2.0
//
// Images in a repository of a registry.
#ifndef LAMINA_FS_IMAGE_REGISTRY_STORE_H_
#define LAMINA_FS_IMAGE_REGISTRY_STORE_H_

#include "chunkstore/registry/registry_client.h"
#include "fs/image/image_store.h"

namespace lamina::fs {

// `reference` is a docker: one. Nothing goes over the network yet.
absl::StatusOr<OpenedStore> OpenRegistryStore(const ImageReference& reference,
                                              const RegistryAccess& access);

// The client of an access, or a new one.
absl::StatusOr<std::shared_ptr<http::Client>> ClientOf(const RegistryAccess& access);

// What is attached to `subject` in this repository and has the artifact type: from the referrers API,
// or where there is none from the tag that stands in for it (distribution-spec, "Referrers Tag
// Schema"). Oldest first by the annotation kCreatedKey, or in the server's order where it is missing
// or equal. The second form gives the whole index behind that tag; empty if there is none.
absl::StatusOr<std::vector<oci::Descriptor>> FindReferrersIn(registry::RegistryClient& client,
                                                             const Digest& subject,
                                                             std::string_view artifact_type);
std::string ReferrersTag(const Digest& subject);
absl::StatusOr<oci::Index> ReadReferrersTag(registry::RegistryClient& client,
                                            const Digest& subject);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_REGISTRY_STORE_H_
