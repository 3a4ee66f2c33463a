// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/lazy_origin.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace lamina::fs {
namespace {

using chunkstore::Origin;
using chunkstore::OriginObject;

class LazyOrigin final : public Origin {
 public:
  LazyOrigin(std::string reference, std::function<absl::StatusOr<RegistryAccess>()> access)
      : reference_(std::move(reference)), access_(std::move(access)) {}

  std::string name() const override { return reference_; }

  absl::StatusOr<std::unique_ptr<OriginObject>> Open(const Digest& digest, uint64_t size) override {
    ASSIGN_OR_RETURN(const std::shared_ptr<Origin> origin, Get());
    return origin->Open(digest, size);
  }

  bool Distrust() override {
    const std::unique_lock lock(mutex_, std::try_to_lock);  // what is being opened was not read yet
    return lock.owns_lock() && origin_ != nullptr && origin_->Distrust();
  }

  // Does not wait for an origin that is being opened.
  uint64_t preferred_request_size() const override { return preferred_request_size_; }

 private:
  absl::StatusOr<std::shared_ptr<Origin>> Get() {
    std::lock_guard lock(mutex_);
    if (origin_ == nullptr) {
      ASSIGN_OR_RETURN(const RegistryAccess access, access_());
      ASSIGN_OR_RETURN(const ImageReference parsed, ImageReference::ParseConverted(reference_));
      ASSIGN_OR_RETURN(const OpenedStore opened, OpenStore(parsed, access), "open {}", reference_);
      ASSIGN_OR_RETURN(origin_, opened.store->OpenOrigin());
      preferred_request_size_ = origin_->preferred_request_size();
    }
    return origin_;
  }

  const std::string reference_;
  const std::function<absl::StatusOr<RegistryAccess>()> access_;
  std::atomic<uint64_t> preferred_request_size_{0};
  std::mutex mutex_;
  std::shared_ptr<Origin> origin_;
};

}  // namespace

std::shared_ptr<Origin> MakeLazyOrigin(std::string reference,
                                       std::function<absl::StatusOr<RegistryAccess>()> access) {
  return std::make_shared<LazyOrigin>(std::move(reference), std::move(access));
}

}  // namespace lamina::fs
