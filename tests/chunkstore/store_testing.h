// SPDX-License-Identifier: Apache-2.0
//
// A blob store over an image layout, both in a directory of their own, for tests.
#ifndef LAMINA_TESTS_CHUNKSTORE_STORE_TESTING_H_
#define LAMINA_TESTS_CHUNKSTORE_STORE_TESTING_H_

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/blob_store.h"
#include "tests/chunkstore/blob_testing.h"

namespace lamina::chunkstore {

// Passes reads on to another origin, counts them, and can delay or fail them. Thread-safe.
class ObservedOrigin : public Origin {
 public:
  using Range = std::pair<uint64_t, uint64_t>;  // offset and length

  explicit ObservedOrigin(std::shared_ptr<Origin> origin) : origin_(std::move(origin)) {}

  std::string name() const override { return "observed " + origin_->name(); }
  absl::StatusOr<std::unique_ptr<OriginObject>> Open(const Digest& digest, uint64_t size) override;
  uint64_t preferred_request_size() const override { return preferred_request_size_; }

  void set_preferred_request_size(uint64_t size) { preferred_request_size_ = size; }
  // Every read fails with this; OK ends it.
  void FailWith(absl::Status status);
  // Reads begin, but do not end until Release.
  void Hold();
  void Release();
  // Streams begin, but stop behind this many bytes until Release.
  void HoldStreamsAfter(uint64_t bytes);
  // Streams that are held say so to their sinks again and again.
  void TellOfSilence() { tells_of_silence_ = true; }
  // Returns once `count` reads wait to be released.
  void AwaitHeld(int count);

  // Of all reads so far, in the order they began.
  std::vector<Range> ranges() const;
  void ForgetRanges();
  int opened() const { return opened_; }

 private:
  class Object;
  absl::Status Begin(const std::vector<Range>& ranges);
  absl::Status PassStream(uint64_t bytes, const OriginObject::Sink& sink);

  const std::shared_ptr<Origin> origin_;
  std::atomic<uint64_t> preferred_request_size_{0};
  std::atomic<int> opened_{0};
  std::atomic<bool> tells_of_silence_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Range> ranges_;
  absl::Status failure_;
  bool holding_ = false;
  uint64_t stream_limit_ = UINT64_MAX;
  int held_ = 0;
};

// Waits for the `done` of Fetch, which must come exactly once.
class FetchResult {
 public:
  std::function<void(absl::Status)> Callback();
  // Blocks until it was called.
  absl::Status Wait();
  bool called() const;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int calls = 0;
    absl::Status status;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Fetches a range and reads it from the data file.
absl::StatusOr<std::string> ReadBlob(Blob& blob, uint64_t offset, uint64_t length,
                                     std::shared_ptr<ReadStats> stats = nullptr);
// As above, for the whole address space.
absl::StatusOr<std::string> ReadBlob(Blob& blob);
// Reads a range as a mount does: piece by piece, under a hold if it is there, else when it has been
// fetched. Right in a store that evicts, too.
absl::StatusOr<std::string> ReadLikeAMount(Blob& blob, uint64_t offset, uint64_t length,
                                           std::shared_ptr<ReadStats> stats = nullptr);
// The address space of a blob, from its object in memory.
std::string AddressSpace(const TestBlob& blob);

// Gives each test a directory with an image layout and a place for a store's state.
class StoreTest : public testing::Test {
 protected:
  void SetUp() override;

  std::string root() const { return root_->path(); }
  std::string state() const { return root() + "/state"; }
  std::string layout() const { return root() + "/layout"; }
  std::string ObjectPath(const TestBlob& blob) const;
  // The file of a blob in the store.
  std::string LocalPath(const TestBlob& blob, const std::string& file) const;

  // Builds a blob of these files and puts it into the layout.
  TestBlob AddBlob(const std::vector<std::string>& files);
  std::shared_ptr<ObservedOrigin> NewOrigin() const;

  std::unique_ptr<BlobStore> OpenStore(std::shared_ptr<NodeIndex> index = nullptr,
                                       int threads = 4) const;
  // In state().
  std::unique_ptr<BlobStore> OpenStore(BlobStore::Options options) const;
  static std::shared_ptr<Blob> Attach(BlobStore& store, const LayerDescriptor& descriptor,
                                      std::shared_ptr<Origin> origin);
  // Attaches and reads all of it with a store of its own.
  void FillBlob(const TestBlob& blob) const;

  // Directory to build in; set before SetUp for another file system.
  std::string parent_ = testing::TempDir();
  std::unique_ptr<TemporaryDirectory> root_;
};

// A fixture whose store is on a file system of its own, of `mebibytes`.
template <typename Fixture, int mebibytes>
class OnSmallDisk : public Fixture {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root to mount a tmpfs";
    Fixture::SetUp();
    std::filesystem::create_directories(this->state());
    const std::string size = fmt::format("size={}m", mebibytes);
    ASSERT_EQ(::mount("tmpfs", this->state().c_str(), "tmpfs", 0, size.c_str()), 0);
    mounted_ = true;
  }
  void TearDown() override {
    if (mounted_) ::umount2(this->state().c_str(), MNT_DETACH);
  }

 private:
  bool mounted_ = false;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_TESTS_CHUNKSTORE_STORE_TESTING_H_
