// SPDX-License-Identifier: Apache-2.0
#include "tests/chunkstore/store_testing.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "chunkstore/oci_layout_origin.h"

namespace lamina::chunkstore {

class ObservedOrigin::Object : public OriginObject {
 public:
  Object(ObservedOrigin* origin, std::unique_ptr<OriginObject> object)
      : origin_(origin), object_(std::move(object)) {}

  absl::Status Read(std::span<const RangeRead> ranges) override {
    std::vector<Range> begun;
    for (const RangeRead& range : ranges) begun.emplace_back(range.offset, range.into.size());
    RETURN_IF_ERROR(origin_->Begin(begun));
    return object_->Read(ranges);
  }

  // One request, as over HTTP.
  absl::Status Stream(uint64_t offset, uint64_t length, std::span<std::byte> buffer,
                      const Sink& sink) override {
    RETURN_IF_ERROR(origin_->Begin({{offset, length}}));
    uint64_t passed = 0;
    return object_->Stream(offset, length, buffer.first(std::min<size_t>(buffer.size(), 100'000)),
                           [&](std::span<const std::byte> piece) {
                             passed += piece.size();
                             RETURN_IF_ERROR(origin_->PassStream(passed, sink));
                             return sink(piece);
                           });
  }

 private:
  ObservedOrigin* const origin_;
  const std::unique_ptr<OriginObject> object_;
};

absl::StatusOr<std::unique_ptr<OriginObject>> ObservedOrigin::Open(const Digest& digest,
                                                                   uint64_t size) {
  ++opened_;
  ASSIGN_OR_RETURN(std::unique_ptr<OriginObject> object, origin_->Open(digest, size));
  return std::make_unique<Object>(this, std::move(object));
}

absl::Status ObservedOrigin::Begin(const std::vector<Range>& ranges) {
  std::unique_lock lock(mutex_);
  ranges_.insert(ranges_.end(), ranges.begin(), ranges.end());
  ++held_;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !holding_; });
  --held_;
  return failure_;
}

absl::Status ObservedOrigin::PassStream(uint64_t bytes, const OriginObject::Sink& sink) {
  std::unique_lock lock(mutex_);
  if (bytes <= stream_limit_) return failure_;
  ++held_;
  changed_.notify_all();
  const auto may_pass = [&] { return bytes <= stream_limit_; };
  while (!changed_.wait_for(lock, std::chrono::milliseconds(20), may_pass)) {
    if (!tells_of_silence_) continue;
    lock.unlock();
    EXPECT_TRUE(sink({}).ok());
    lock.lock();
  }
  --held_;
  return failure_;
}

void ObservedOrigin::HoldStreamsAfter(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  stream_limit_ = bytes;
}

void ObservedOrigin::FailWith(absl::Status status) {
  std::lock_guard lock(mutex_);
  failure_ = std::move(status);
}

void ObservedOrigin::Hold() {
  std::lock_guard lock(mutex_);
  holding_ = true;
}

void ObservedOrigin::Release() {
  std::lock_guard lock(mutex_);
  holding_ = false;
  stream_limit_ = UINT64_MAX;
  changed_.notify_all();
}

void ObservedOrigin::AwaitHeld(int count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return held_ >= count; });
}

std::vector<ObservedOrigin::Range> ObservedOrigin::ranges() const {
  std::lock_guard lock(mutex_);
  return ranges_;
}

void ObservedOrigin::ForgetRanges() {
  std::lock_guard lock(mutex_);
  ranges_.clear();
}

std::function<void(absl::Status)> FetchResult::Callback() {
  return [state = state_](absl::Status status) {
    std::lock_guard lock(state->mutex);
    EXPECT_EQ(++state->calls, 1) << "called again: " << status;
    state->status = std::move(status);
    state->changed.notify_all();
  };
}

absl::Status FetchResult::Wait() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->calls > 0; });
  return state_->status;
}

bool FetchResult::called() const {
  std::lock_guard lock(state_->mutex);
  return state_->calls > 0;
}

absl::StatusOr<std::string> ReadBlob(Blob& blob, uint64_t offset, uint64_t length,
                                     std::shared_ptr<ReadStats> stats) {
  FetchResult result;
  blob.Fetch(offset, length, Priority::kForeground, std::move(stats), result.Callback());
  RETURN_IF_ERROR(result.Wait());
  EXPECT_TRUE(blob.Ready(offset, length));
  std::string content(length, '\0');
  RETURN_IF_ERROR(ReadFull(blob.data_fd(), offset, std::as_writable_bytes(std::span(content))));
  return content;
}

absl::StatusOr<std::string> ReadLikeAMount(Blob& blob, uint64_t offset, uint64_t length,
                                           std::shared_ptr<ReadStats> stats) {
  constexpr uint64_t kRequest = 128 << 10;
  std::string content(length, '\0');
  for (uint64_t done = 0; done < length; done += kRequest) {
    const auto into = std::as_writable_bytes(std::span(content))
                          .subspan(done)
                          .first(std::min(kRequest, length - done));
    if (const Blob::Hold hold = blob.HoldIfReady(offset + done, into.size()); hold) {
      RETURN_IF_ERROR(ReadFull(blob.data_fd(), offset + done, into));
      continue;
    }
    FetchResult result;
    blob.Fetch(offset + done, into.size(), Priority::kForeground, stats,
               [&, callback = result.Callback()](absl::Status status) {
                 if (status.ok()) status = ReadFull(blob.data_fd(), offset + done, into);
                 callback(status);
               });
    RETURN_IF_ERROR(result.Wait());
  }
  return content;
}

absl::StatusOr<std::string> ReadBlob(Blob& blob) { return ReadBlob(blob, 0, blob.size()); }

std::string AddressSpace(const TestBlob& blob) {
  OpenBlob open;
  const absl::Status status = open.Open(blob.object, blob.descriptor());
  EXPECT_TRUE(status.ok()) << status;
  return open.address_space;
}

void StoreTest::SetUp() {
  auto root = TemporaryDirectory::Create(parent_, "lamina-store-");
  ASSERT_TRUE(root.ok()) << root.status();
  root_ = std::make_unique<TemporaryDirectory>(std::move(*root));
  std::filesystem::create_directories(layout() + "/blobs/sha256");
}

std::string StoreTest::ObjectPath(const TestBlob& blob) const {
  return layout() + "/blobs/sha256/" + blob.info.digest.Hex();
}

std::string StoreTest::LocalPath(const TestBlob& blob, const std::string& file) const {
  return state() + "/" + blob.descriptor().Key().Hex() + "/" + file;
}

TestBlob StoreTest::AddBlob(const std::vector<std::string>& files) {
  TestBlob blob = BuildBlob(files);
  std::ofstream(ObjectPath(blob), std::ios::binary) << blob.object;
  return blob;
}

std::shared_ptr<ObservedOrigin> StoreTest::NewOrigin() const {
  auto origin = OpenOciLayoutOrigin(layout());
  EXPECT_TRUE(origin.ok()) << origin.status();
  return std::make_shared<ObservedOrigin>(std::move(*origin));
}

std::unique_ptr<BlobStore> StoreTest::OpenStore(std::shared_ptr<NodeIndex> index,
                                                int threads) const {
  return OpenStore({.index = std::move(index), .threads = threads});
}

std::unique_ptr<BlobStore> StoreTest::OpenStore(BlobStore::Options options) const {
  options.directory = state();
  auto store = BlobStore::Open(std::move(options));
  EXPECT_TRUE(store.ok()) << store.status();
  return std::move(*store);
}

std::shared_ptr<Blob> StoreTest::Attach(BlobStore& store, const LayerDescriptor& descriptor,
                                        std::shared_ptr<Origin> origin) {
  auto attached = store.Attach(descriptor, std::move(origin));
  EXPECT_TRUE(attached.ok()) << attached.status();
  return *std::move(attached);
}

void StoreTest::FillBlob(const TestBlob& blob) const {
  const auto store = OpenStore();
  const auto attached = store->Attach(blob.descriptor(), NewOrigin());
  ASSERT_TRUE(attached.ok()) << attached.status();
  const auto content = ReadBlob(**attached);
  ASSERT_TRUE(content.ok()) << content.status();
  ASSERT_TRUE(*content == AddressSpace(blob));
}

}  // namespace lamina::chunkstore
