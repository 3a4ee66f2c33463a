// SPDX-License-Identifier: Apache-2.0
#include "fs/image/sequential_source.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <mutex>
#include <utility>
#include <vector>

namespace lamina::fs {
namespace {

// Read at once, over several connections.
constexpr uint64_t kWindow = 8 << 20;

class SequentialSource : public ByteSource {
 public:
  SequentialSource(std::unique_ptr<chunkstore::OriginObject> object, uint64_t size)
      : object_(std::move(object)), size_(size) {}

  absl::Status Read(uint64_t offset, std::span<std::byte> into) const override {
    const std::lock_guard lock(mutex_);
    while (!into.empty()) {
      RETURN_IF_ERROR(MakeCurrent(offset - offset % kWindow));
      const uint64_t skip = offset - current_.offset;
      if (skip >= current_.bytes.size()) {
        return absl::DataLossError(fmt::format("there is nothing at {}", offset));
      }
      const size_t length = std::min<uint64_t>(into.size(), current_.bytes.size() - skip);
      std::memcpy(into.data(), current_.bytes.data() + skip, length);
      offset += length;
      into = into.subspan(length);
    }
    return absl::OkStatus();
  }

 private:
  struct Window {
    uint64_t offset = UINT64_MAX;
    std::vector<std::byte> bytes;
  };

  // Has the window that begins at `offset` in current_, and the one behind it on its way.
  absl::Status MakeCurrent(uint64_t offset) const {
    if (current_.offset == offset) return absl::OkStatus();
    const bool is_coming = next_.valid() && next_offset_ == offset;
    absl::StatusOr<Window> window = is_coming ? next_.get() : ReadWindow(offset);
    if (next_.valid()) next_ = {};  // waits for what is not needed after all
    RETURN_IF_ERROR(window.status());
    current_ = *std::move(window);
    next_offset_ = offset + kWindow;
    if (next_offset_ < size_) {
      next_ =
          std::async(std::launch::async, [this, next = next_offset_] { return ReadWindow(next); });
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Window> ReadWindow(uint64_t offset) const {
    if (offset >= size_) return absl::DataLossError(fmt::format("there is nothing at {}", offset));
    Window window{offset, std::vector<std::byte>(std::min(kWindow, size_ - offset))};
    const chunkstore::RangeRead range{offset, window.bytes};
    RETURN_IF_ERROR(object_->Read(std::span(&range, 1)));
    return window;
  }

  const std::unique_ptr<chunkstore::OriginObject> object_;
  const uint64_t size_;
  mutable std::mutex mutex_;  // guards what follows
  mutable Window current_;
  mutable uint64_t next_offset_ = 0;
  mutable std::future<absl::StatusOr<Window>> next_;  // last: its thread uses the object
};

}  // namespace

std::shared_ptr<const ByteSource> MakeSequentialSource(
    std::unique_ptr<chunkstore::OriginObject> object, uint64_t size) {
  return std::make_shared<const SequentialSource>(std::move(object), size);
}

}  // namespace lamina::fs
