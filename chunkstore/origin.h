// SPDX-License-Identifier: Apache-2.0
//
// Where objects (layer blobs) come from. An origin only moves bytes: what they are worth is decided
// by digests above it, so an origin may lie, truncate or fail without harm.
#ifndef LAMINA_CHUNKSTORE_ORIGIN_H_
#define LAMINA_CHUNKSTORE_ORIGIN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/status.h"

namespace lamina::chunkstore {

// One range of an object and where its bytes go.
struct RangeRead {
  uint64_t offset = 0;
  std::span<std::byte> into;
};

// An open object. Any number of threads may read at once.
class OriginObject {
 public:
  virtual ~OriginObject() = default;
  // Fills all ranges, in flight together where the origin can, and returns when the last is done.
  // An error means that the content of every `into` is undefined. A range past the end of the
  // object is kDataLoss. It may block for as long as the origin's own time limits allow.
  virtual absl::Status Read(std::span<const RangeRead> ranges) = 0;

  // Takes the next bytes of a stream. An empty piece says that nothing has come for a while, if the
  // origin can tell: who keeps others waiting for what is about to come should not do so any longer.
  using Sink = std::function<absl::Status(std::span<const std::byte>)>;
  // Reads `length` bytes from `offset` on and gives them to `sink` in order, piece by piece, as
  // they arrive, with as few requests as there can be. Ends with the sink's error if that has one.
  // `buffer` is for the origin's use and not empty. An origin whose requests cost nothing need not
  // know better than to fill it again and again.
  virtual absl::Status Stream(uint64_t offset, uint64_t length, std::span<std::byte> buffer,
                              const Sink& sink);
};

class Origin {
 public:
  virtual ~Origin() = default;
  // How errors and logs name it, e.g. "oci:/srv/images".
  virtual std::string name() const = 0;
  // kNotFound if it has no such object, kDataLoss if the object has another size: from here, or from
  // the first read where finding it out would cost a request.
  virtual absl::StatusOr<std::unique_ptr<OriginObject>> Open(const Digest& digest,
                                                             uint64_t size) = 0;
  // To be called when bytes that were read are not what their digest says. True if there is another
  // place to read them from, which reads use from now on: then it is worth another try.
  virtual bool Distrust() { return false; }
  // Requests below this many bytes are not worth a round trip: 0 for local disks.
  virtual uint64_t preferred_request_size() const { return 0; }
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_ORIGIN_H_
