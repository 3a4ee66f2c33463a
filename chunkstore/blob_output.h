// SPDX-License-Identifier: Apache-2.0
//
// Where the object that a BlobWriter makes goes: a file, or a registry while it is still growing.
#ifndef LAMINA_CHUNKSTORE_BLOB_OUTPUT_H_
#define LAMINA_CHUNKSTORE_BLOB_OUTPUT_H_

#include <cstddef>
#include <span>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"

namespace lamina::chunkstore {

// Used by one thread at a time. An output that goes without Finish leaves nothing that could be taken for a
// whole object.
class BlobOutput {
 public:
  virtual ~BlobOutput() = default;
  virtual absl::Status Append(std::span<const std::byte> bytes) = 0;
  // The object is complete, and has this digest: makes it durable.
  virtual absl::Status Finish(const Digest& digest) = 0;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_BLOB_OUTPUT_H_
