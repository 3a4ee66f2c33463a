// SPDX-License-Identifier: Apache-2.0
//
// One long read of a blob in a registry: a single request, whose bytes are given out as they arrive,
// tried at one source after the other.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_STREAM_READ_H_
#define LAMINA_CHUNKSTORE_REGISTRY_STREAM_READ_H_

#include <chrono>
#include <cstdint>

#include "chunkstore/origin.h"
#include "chunkstore/registry/repository.h"

namespace lamina::registry {

// Used once, by one thread, which the sink runs on, and is given an empty piece whenever nothing has
// come for kPatience. While it works, the next bytes are received: up
// to kMaxQueued, then the connection is left alone until there is room again. A connection that
// breaks is taken up where it broke, by the same rules as other requests' (http/client.h); what one
// source does not give, the next one is asked for.
class StreamRead {
 public:
  static constexpr size_t kMaxQueued = 1 << 20;
  static constexpr std::chrono::seconds kPatience{1};

  StreamRead(Repository& repository, const Digest& digest, uint64_t size)
      : repository_(repository), digest_(digest), size_(size) {}

  absl::Status Run(uint64_t offset, uint64_t length, const chunkstore::OriginObject::Sink& sink);

 private:
  class Pipe;

  // Reads on from one source. An error with `refused_` unset is the source's.
  absl::Status ReadFrom(Source& source);
  // One request; the response if it was no success.
  absl::StatusOr<http::Response> Request(RegistryClient& client, http::Request request);
  absl::Status Drain(Pipe& pipe, uint64_t id);

  Repository& repository_;
  const Digest digest_;
  const uint64_t size_;
  const chunkstore::OriginObject::Sink* sink_ = nullptr;
  uint64_t next_ = 0;  // what the sink gets next, and where that ends
  uint64_t end_ = 0;
  bool refused_ = false;  // by the sink
};

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_STREAM_READ_H_
