// SPDX-License-Identifier: Apache-2.0
//
// A blob at its origins: opened when it is first needed, and again after it failed. What one origin
// does not have, or has wrong, comes from another one.
#ifndef LAMINA_CHUNKSTORE_ORIGIN_BLOB_H_
#define LAMINA_CHUNKSTORE_ORIGIN_BLOB_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/blob_tables.h"
#include "chunkstore/local_blob.h"
#include "chunkstore/origin.h"

namespace lamina::chunkstore {

// Thread-safe. Errors name the origins.
class OriginBlob {
 public:
  // `origin` may be null: every read fails then, until there is one.
  OriginBlob(const LayerDescriptor& descriptor, std::shared_ptr<Origin> origin);

  // Another place to read from; null is none. It is asked after those that there are, until one of
  // them fails: a bad origin that comes later changes nothing, one that came first costs one failure.
  // One that has the name of an earlier one takes its place, as its credentials are newer. Reads
  // that run stay with the old origin.
  void AddOrigin(std::shared_ptr<Origin> origin);
  // "origin oci:/srv/images", for errors: the one that is asked first.
  std::string name() const;
  // Likewise.
  uint64_t preferred_request_size() const;
  // The same for all blobs of that origin, and for hardly any of another one.
  size_t id() const;

  absl::Status Read(std::span<const RangeRead> ranges);
  // OriginObject::Stream; the sink's errors are passed on as they are.
  absl::Status Stream(uint64_t offset, uint64_t length, std::span<std::byte> buffer,
                      const OriginObject::Sink& sink);
  // Changes whenever another origin comes first, or the one there is was opened again.
  uint64_t order() const;
  // To be called when bytes that were read are not what their digest says, with the order before they
  // were read, and the number of times that this was so already. True if it is worth another try, from
  // another place, or from the only one, which is opened again: its object may have been repaired by one
  // in its place. Reads use that from now on. Of many readers that got wrong bytes from an origin at the
  // same time, only the first one sends it back.
  bool Distrust(uint64_t order, size_t attempt);
  // Calls `attempt`, which reads something and says kDataLoss if it is not what its digest says, until
  // it is right, or there is no other place to read it from. `tried`: how often it was wrong before.
  template <typename Attempt>
  auto UntilRight(const Attempt& attempt, size_t tried = 0) {
    for (;; ++tried) {
      const uint64_t before = order();
      auto result = attempt();
      if (!absl::IsDataLoss(StatusOf(result)) || !Distrust(before, tried)) return result;
    }
  }

  // All tables of the blob, verified; with one request to an origin to which requests are dear, if
  // they are not unusually large for its size. The metadata go to a file, whose content they replace,
  // open for reading and writing.
  absl::StatusOr<BlobTables> ReadTables(int metadata);
  // The decoded chunk table, verified but not parsed.
  absl::StatusOr<std::string> ReadChunkTable(const SectionTable& sections);

 private:
  static const absl::Status& StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }

  class Source;
  using Use = std::function<absl::Status(OriginObject&)>;

  std::vector<std::shared_ptr<Source>> Sources() const;
  // Has the first source that can be used be the first one from now on. An error of `use` sends it to
  // the next source, unless `final` is set by then.
  absl::Status UseAny(const Use& use, const bool& final);
  absl::StatusOr<BlobTables> TryToReadTables(int metadata);
  // Bytes at the end of the object that probably hold the tables.
  uint64_t TailLength() const;
  absl::StatusOr<std::string> TryToReadChunkTable(const SectionTable& sections);

  const LayerDescriptor descriptor_;
  mutable std::mutex mutex_;                      // never held while an origin is asked
  std::vector<std::shared_ptr<Source>> sources_;  // in the order in which they are asked
  uint64_t order_ = 0;                            // changes with it
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_ORIGIN_BLOB_H_
