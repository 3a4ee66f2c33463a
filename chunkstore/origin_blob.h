// SPDX-License-Identifier: Apache-2.0
//
// A blob at its origin: opened when it is first needed, and again after it failed.
#ifndef LAMINA_CHUNKSTORE_ORIGIN_BLOB_H_
#define LAMINA_CHUNKSTORE_ORIGIN_BLOB_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "chunkstore/blob_tables.h"
#include "chunkstore/local_blob.h"
#include "chunkstore/origin.h"

namespace lamina::chunkstore {

// Thread-safe. Errors name the origin.
class OriginBlob {
 public:
  // `origin` may be null: every read fails then.
  OriginBlob(const LayerDescriptor& descriptor, std::shared_ptr<Origin> origin);

  // Reads that run stay with the old origin.
  void SetOrigin(std::shared_ptr<Origin> origin);
  // "origin oci:/srv/images", for errors.
  std::string name() const;
  uint64_t preferred_request_size() const;

  absl::Status Read(std::span<const RangeRead> ranges);
  // OriginObject::Stream; the sink's errors are passed on as they are.
  absl::Status Stream(uint64_t offset, uint64_t length, std::span<std::byte> buffer,
                      const OriginObject::Sink& sink);
  // Of the origin.
  bool Distrust();

  // What a node needs before it can use the blob. Verified.
  absl::StatusOr<BlobTables> ReadTables();
  // The decoded chunk table, verified but not parsed.
  absl::StatusOr<std::string> ReadChunkTable(const SectionTable& sections);

 private:
  absl::StatusOr<std::shared_ptr<OriginObject>> Object();
  // After a read of it failed: the next read opens it anew.
  void Drop(const std::shared_ptr<OriginObject>& object);
  absl::StatusOr<BlobTables> TryToReadTables();

  const LayerDescriptor descriptor_;
  mutable std::mutex mutex_;
  std::shared_ptr<Origin> origin_;
  std::string name_;
  std::shared_ptr<OriginObject> object_;  // null: to be opened
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_ORIGIN_BLOB_H_
