// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/lazy_origin.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "fs/image/image.h"

namespace lamina::fs {
namespace {

using chunkstore::Origin;
using chunkstore::OriginObject;

class LazyOrigin final : public Origin {
 public:
  explicit LazyOrigin(std::string reference) : reference_(std::move(reference)) {}

  std::string name() const override { return reference_; }

  absl::StatusOr<std::unique_ptr<OriginObject>> Open(const Digest& digest, uint64_t size) override {
    ASSIGN_OR_RETURN(const std::shared_ptr<Origin> origin, Get());
    return origin->Open(digest, size);
  }

  // Does not wait for an origin that is being opened.
  uint64_t preferred_request_size() const override { return preferred_request_size_; }

 private:
  absl::StatusOr<std::shared_ptr<Origin>> Get() {
    std::lock_guard lock(mutex_);
    if (origin_ == nullptr) {
      ASSIGN_OR_RETURN(const Image image, OpenImage(reference_, oci::Platform::Host()));
      origin_ = image.origin;
      preferred_request_size_ = origin_->preferred_request_size();
    }
    return origin_;
  }

  const std::string reference_;
  std::atomic<uint64_t> preferred_request_size_{0};
  std::mutex mutex_;
  std::shared_ptr<Origin> origin_;
};

}  // namespace

std::shared_ptr<Origin> MakeLazyOrigin(std::string reference) {
  return std::make_shared<LazyOrigin>(std::move(reference));
}

}  // namespace lamina::fs
