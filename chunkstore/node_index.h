// SPDX-License-Identifier: Apache-2.0
//
// What a node must remember in transactions, in RocksDB: which chunks its blobs hold, and which
// mounts it serves. One process at a time has it open.
#ifndef LAMINA_CHUNKSTORE_NODE_INDEX_H_
#define LAMINA_CHUNKSTORE_NODE_INDEX_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"
#include "chunkstore/blob_tables.h"

namespace lamina::chunkstore {

// Thread-safe. Blobs are named by LayerDescriptor::Key().
class NodeIndex {
 public:
  // A chunk in a blob of this node.
  struct ChunkLocation {
    Digest blob;
    uint32_t first_block = 0;
    uint32_t length = 0;
  };

  // kUnavailable if another process has it open. A damaged database is an error that says so and
  // how to start over (nothing in it is precious: blobs are fetched and indexed again).
  static absl::StatusOr<std::unique_ptr<NodeIndex>> Open(const std::string& directory);
  // Like Open, on a thread of its own: opening takes longer than mounting an image whose metadata is
  // there. Calls wait for it, and give its error if it failed.
  static std::unique_ptr<NodeIndex> OpenInBackground(const std::string& directory);
  virtual ~NodeIndex() = default;

  // All chunks of a blob in one transaction; does nothing if they are there.
  virtual absl::Status AddBlob(const Digest& blob, const ChunkTable& chunks) = 0;
  virtual absl::StatusOr<bool> HasBlob(const Digest& blob) const = 0;
  virtual absl::Status RemoveBlob(const Digest& blob, const ChunkTable& chunks) = 0;
  // Places of a chunk in blobs other than `except`, at most a handful.
  virtual absl::StatusOr<std::vector<ChunkLocation>> FindChunk(const Digest& chunk,
                                                               const Digest& except) const = 0;

  // Mount records: text that fs/ writes and reads, by mount id.
  virtual absl::Status PutMount(const std::string& id, const std::string& record) = 0;
  virtual absl::Status RemoveMount(const std::string& id) = 0;
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Mounts() const = 0;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_NODE_INDEX_H_
