// SPDX-License-Identifier: Apache-2.0
//
// Pushes a blob whose digest is only known at its end, in chunks (distribution-spec, "Pushing a blob
// in chunks"): nothing is kept but the chunk that is filled and the one that is on its way. A chunk
// that failed goes on where the server says it stopped.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_UPLOAD_H_
#define LAMINA_CHUNKSTORE_REGISTRY_UPLOAD_H_

#include <memory>
#include <string_view>

#include "chunkstore/blob_output.h"
#include "chunkstore/registry/registry_client.h"

namespace lamina::registry {

// `client` must outlive the output, and have been made for Access::kPush. A blob that is smaller than
// a chunk goes up in two requests. An upload that is given up is cancelled at the server. kAborted if
// the server has lost a part that is no longer kept, which only a new upload can mend.
std::unique_ptr<chunkstore::BlobOutput> StartUpload(RegistryClient& client);

// A whole blob from memory, unless it is there already or can be had from `from_repository` (empty: no
// such try) of the same registry.
absl::Status PutBlob(RegistryClient& client, std::string_view content,
                     const std::string& from_repository);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_UPLOAD_H_
