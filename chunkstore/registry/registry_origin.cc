// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/registry_origin.h"

#include <utility>

#include "chunkstore/registry/latency_window.h"
#include "chunkstore/registry/parallel_read.h"
#include "chunkstore/registry/range_plan.h"
#include "chunkstore/registry/stream_read.h"

namespace lamina::registry {
namespace {

using chunkstore::RangeRead;

// Below this a request's round trip costs more than its bytes, on any network worth the name.
constexpr uint64_t kPreferredRequest = 256 << 10;

// What an origin and its open objects share.
struct Shared {
  explicit Shared(std::shared_ptr<Repository> r) : repository(std::move(r)) {}
  const std::shared_ptr<Repository> repository;
  LatencyWindow latencies;
};

class RegistryObject : public chunkstore::OriginObject {
 public:
  RegistryObject(std::shared_ptr<Shared> shared, const Digest& digest, uint64_t size)
      : shared_(std::move(shared)), digest_(digest), size_(size) {}

  absl::Status Read(std::span<const RangeRead> ranges) override {
    for (const RangeRead& range : ranges) RETURN_IF_ERROR(Check(range.offset, range.into.size()));
    ParallelRead read(*shared_->repository, digest_, size_, shared_->latencies);
    return read.Run(PlanRequests(ranges));
  }

  absl::Status Stream(uint64_t offset, uint64_t length, std::span<std::byte> /*buffer*/,
                      const Sink& sink) override {
    RETURN_IF_ERROR(Check(offset, length));
    return StreamRead(*shared_->repository, digest_, size_).Run(offset, length, sink);
  }

 private:
  absl::Status Check(uint64_t offset, uint64_t length) const {
    if (offset <= size_ && length <= size_ - offset) return absl::OkStatus();
    return absl::DataLossError(fmt::format("{}: {} bytes at {} are past the end at {}",
                                           digest_.ToString(), length, offset, size_));
  }

  const std::shared_ptr<Shared> shared_;
  const Digest digest_;
  const uint64_t size_;
};

class RegistryOrigin : public chunkstore::Origin {
 public:
  explicit RegistryOrigin(std::shared_ptr<Repository> repository)
      : shared_(std::make_shared<Shared>(std::move(repository))) {}

  std::string name() const override { return "docker://" + shared_->repository->name(); }

  absl::StatusOr<std::unique_ptr<chunkstore::OriginObject>> Open(const Digest& digest,
                                                                 uint64_t size) override {
    // What there is to find out the first read finds out, without a round trip of its own.
    return std::make_unique<RegistryObject>(shared_, digest, size);
  }

  bool Distrust() override { return shared_->repository->SetMirrorsDown(); }

  uint64_t preferred_request_size() const override { return kPreferredRequest; }

 private:
  const std::shared_ptr<Shared> shared_;
};

}  // namespace

std::unique_ptr<chunkstore::Origin> MakeRegistryOrigin(std::shared_ptr<Repository> repository) {
  return std::make_unique<RegistryOrigin>(std::move(repository));
}

}  // namespace lamina::registry
