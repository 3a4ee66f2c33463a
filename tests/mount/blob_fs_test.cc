// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/blob_fs.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <thread>

#include "fs/mount/mount.h"
#include "tests/mount/mount_testing.h"

namespace lamina::fs {
namespace {

using chunkstore::ReadStats;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr uint64_t kFileSize = 4 << 20;

// A blob in memory whose fetches wait for the test.
class FakeBlob final : public chunkstore::Blob {
 public:
  explicit FakeBlob(char fill) : fd_(::memfd_create("blob", MFD_CLOEXEC)) {
    const std::string content(kFileSize, fill);
    EXPECT_TRUE(WriteFull(fd_.get(), 0, AsBytes(content)).ok());
  }

  const chunkstore::LayerDescriptor& descriptor() const override { return descriptor_; }
  uint64_t size() const override { return kFileSize; }
  uint32_t blocks() const override { return kFileSize / chunkstore::kBlockSize; }
  std::span<const std::byte> metadata() const override { return {}; }
  const chunkstore::FrameTable& frames() const override { return frames_; }
  int data_fd() const override { return fd_.get(); }
  bool Ready(uint64_t, uint64_t) const override { return ready_; }
  Hold HoldIfReady(uint64_t, uint64_t) override { return ready_ ? readers_.Enter() : Hold(); }
  void Fetch(uint64_t, uint64_t, chunkstore::Priority, std::shared_ptr<ReadStats>,
             std::function<void(absl::Status)> done) override {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(done));
    changed_.notify_all();
  }
  void ShareChunks() override {}
  absl::Status ReadThrough(uint64_t, std::span<std::byte> into, ReadStats&) override {
    if (!reads_through_) return absl::UnavailableError("no origin");
    std::ranges::fill(into, std::byte{'t'});
    return absl::OkStatus();
  }
  uint64_t present_frames() const override { return 0; }
  uint64_t present_bytes() const override { return 0; }

  void set_ready(bool ready) { ready_ = ready; }
  void set_reads_through() { reads_through_ = true; }
  // Answers `count` fetches, waiting for them to come.
  void Answer(size_t count, const absl::Status& status) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.size() >= count; });
    for (auto& done : std::exchange(waiting_, {})) done(status);
  }
  void AwaitFetches(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.size() >= count; });
  }

 private:
  const UniqueFd fd_;
  chunkstore::DataReaders readers_;
  const chunkstore::LayerDescriptor descriptor_;
  const chunkstore::FrameTable frames_;
  std::atomic<bool> ready_{true};
  std::atomic<bool> reads_through_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void(absl::Status)>> waiting_;
};

class BlobFsTest : public MountTest {
 protected:
  void SetUp() override {
    MountTest::SetUp();
    if (IsSkipped()) return;
    auto fs = BlobFs::Start(target());
    ASSERT_TRUE(fs.ok()) << fs.status();
    fs_ = *std::move(fs);
  }
  void TearDown() override {
    fs_.reset();
    MountTest::TearDown();
  }

  std::string path(const std::string& id, int slot) const {
    return fmt::format("{}/{}/{}", fs_->mountpoint(), id, slot);
  }
  std::vector<std::string> Names(const std::string& below) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(target() + below)) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  // RELEASE comes some time after close(2).
  bool AllClosedSoon(const std::string& id) const {
    for (int i = 0; i < 500 && fs_->open_files(id) != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return fs_->open_files(id) == 0;
  }

  std::unique_ptr<BlobFs> fs_;
  std::shared_ptr<FakeBlob> a_ = std::make_shared<FakeBlob>('a');
  std::shared_ptr<FakeBlob> b_ = std::make_shared<FakeBlob>('b');
  std::shared_ptr<ReadStats> stats_ = std::make_shared<ReadStats>();
};

TEST_F(BlobFsTest, ShowsADirectoryForEachMountWithAFileForEachSlot) {
  EXPECT_THAT(Names(""), IsEmpty());
  ASSERT_TRUE(fs_->Add("one", {a_, b_}, stats_).ok());
  ASSERT_TRUE(fs_->Add("two", {b_}, stats_).ok());
  EXPECT_THAT(Names(""), ElementsAre("one", "two"));
  EXPECT_THAT(Names("/one"), ElementsAre("1", "2"));
  EXPECT_EQ(ReadAt(path("one", 1), 100, 3).value(), "aaa");
  EXPECT_EQ(ReadAt(path("one", 2), 100, 3).value(), "bbb");
  EXPECT_EQ(ReadAt(path("two", 1), 100, 3).value(), "bbb");
  EXPECT_EQ(std::filesystem::file_size(path("one", 1)), kFileSize);
}

TEST_F(BlobFsTest, OtherNamesAreNotThere) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  for (const char* name : {"/two", "/one/0", "/one/2", "/one/01", "/one/1x", "/one/x", "/one/-1",
                           "/one/65537", "/one/18446744073709551617"}) {
    EXPECT_EQ(::access((target() + name).c_str(), F_OK), -1) << name;
    EXPECT_EQ(errno, ENOENT) << name;
  }
}

TEST_F(BlobFsTest, IdsMustBeFreeFileNames) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(fs_->Add("one", {b_}, stats_)));
  EXPECT_EQ(ReadAt(path("one", 1), 0, 1).value(), "a");
  for (const char* id : {"", ".", "..", "a/b"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(fs_->Add(id, {a_}, stats_))) << id;
  }
}

TEST_F(BlobFsTest, ReadsEndWithTheFile) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  EXPECT_EQ(ReadAt(path("one", 1), kFileSize - 10, 100).value(), "aaaaaaaaaa");
  EXPECT_EQ(ReadAt(path("one", 1), kFileSize, 100).value(), "");
  EXPECT_EQ(ReadAt(path("one", 1), kFileSize * 2, 100).value(), "");
  EXPECT_EQ(ReadAt(path("one", 1), 0, kFileSize + 1).value(), std::string(kFileSize, 'a'));
}

TEST_F(BlobFsTest, CountsWhatIsReadForTheMountThatReadsIt) {
  const auto other = std::make_shared<ReadStats>();
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  ASSERT_TRUE(fs_->Add("other", {a_}, other).ok());
  ASSERT_TRUE(ReadAt(path("one", 1), 0, 5000).ok());
  EXPECT_EQ(stats_->read_requests, 1u);
  EXPECT_EQ(stats_->read_bytes, 5000u);
  EXPECT_EQ(stats_->missed_requests, 0u);
  EXPECT_EQ(stats_->hit_latency.count(), 1u);
  EXPECT_EQ(other->read_requests, 0u);
}

TEST_F(BlobFsTest, AMissIsAnsweredWhenItHasBeenFetched) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  a_->set_ready(false);
  std::thread reader(
      [&] { EXPECT_EQ(ReadAt(path("one", 1), 0, 300'000).value(), std::string(300'000, 'a')); });
  a_->Answer(1, absl::OkStatus());
  reader.join();
  EXPECT_EQ(stats_->missed_requests, 1u);
  EXPECT_EQ(stats_->failed_requests, 0u);
}

TEST_F(BlobFsTest, AFailedFetchIsEioWhateverTheReason) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  a_->set_ready(false);
  for (const absl::Status& reason :
       {absl::NotFoundError("gone"), absl::ResourceExhaustedError("disk full"),
        absl::DataLossError("wrong digest"), absl::PermissionDeniedError("token expired")}) {
    std::thread reader([&] {
      const UniqueFd fd(::open(path("one", 1).c_str(), O_RDONLY | O_CLOEXEC));
      char byte = 0;
      EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), -1);
      EXPECT_EQ(errno, EIO) << reason;
    });
    a_->Answer(1, reason);
    reader.join();
  }
  EXPECT_EQ(stats_->failed_requests, 4u);
}

TEST_F(BlobFsTest, ReadsThroughWhatThereIsNoRoomFor) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  a_->set_ready(false);
  a_->set_reads_through();
  std::thread reader([&] { EXPECT_EQ(ReadAt(path("one", 1), 5, 3).value_or(""), "ttt"); });
  a_->Answer(1, absl::ResourceExhaustedError("disk full"));
  reader.join();
  EXPECT_EQ(stats_->failed_requests, 0u);
}

TEST_F(BlobFsTest, WaitingReadersDoNotHoldUpOthers) {
  constexpr size_t kWaiting = 64;  // more than there are threads
  ASSERT_TRUE(fs_->Add("one", {a_, b_}, stats_).ok());
  a_->set_ready(false);
  std::vector<std::thread> readers;
  for (size_t i = 0; i < kWaiting; ++i) {
    readers.emplace_back([&] { EXPECT_EQ(ReadAt(path("one", 1), 0, 10)->size(), 10u); });
  }
  a_->AwaitFetches(kWaiting);
  EXPECT_EQ(ReadAt(path("one", 2), 0, 1).value(), "b");
  a_->Answer(kWaiting, absl::OkStatus());
  for (std::thread& reader : readers) reader.join();
}

TEST_F(BlobFsTest, OpenFilesOutliveTheRemovalOfTheirMount) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  EXPECT_EQ(fs_->open_files("one"), 0u);
  UniqueFd fd(::open(path("one", 1).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  EXPECT_EQ(fs_->open_files("one"), 1u);
  fs_->Remove("one");
  EXPECT_THAT(Names(""), IsEmpty());
  EXPECT_EQ(::access(path("one", 1).c_str(), F_OK), -1);
  char byte = 0;
  EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), 1);
  EXPECT_EQ(byte, 'a');
  EXPECT_EQ(fs_->open_files("one"), 1u);

  // The id is free at once.
  ASSERT_TRUE(fs_->Add("one", {b_}, stats_).ok());
  EXPECT_EQ(ReadAt(path("one", 1), 0, 1).value(), "b");
  EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), 1);
  EXPECT_EQ(byte, 'a');
  fd.Reset();
  EXPECT_TRUE(AllClosedSoon("one"));
}

TEST_F(BlobFsTest, LetsGoOfBlobsThatNobodyUsesAnyMore) {
  auto owned = std::make_shared<FakeBlob>('a');
  const std::weak_ptr<FakeBlob> blob = owned;
  ASSERT_TRUE(fs_->Add("one", {std::move(owned)}, stats_).ok());
  ASSERT_TRUE(ReadAt(path("one", 1), 0, 1).ok());
  ASSERT_TRUE(AllClosedSoon("one"));
  fs_->Remove("one");
  // The kernel forgets the file when the name is taken from it.
  for (int i = 0; i < 500 && !blob.expired(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(blob.expired());
}

TEST_F(BlobFsTest, ManyCyclesOfAddAndRemoveUnderLoad) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        const auto got = ReadAt(path("one", 1), 4096, 8192);
        if (got.ok()) {
          EXPECT_TRUE(*got == std::string(8192, 'a'));
        } else {
          EXPECT_TRUE(absl::IsNotFound(got.status())) << got.status();
        }
      }
    });
  }
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
    ASSERT_TRUE(fs_->Add("two", {b_}, stats_).ok());
    fs_->Remove("one");
    fs_->Remove("two");
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

TEST_F(BlobFsTest, FilesInUseGiveErrorsOnceItHasStopped) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  const UniqueFd fd(::open(path("one", 1).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  fs_.reset();
  char byte = 0;
  EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), -1);
  EXPECT_FALSE(FindMount(target()).value().has_value());
}

TEST_F(BlobFsTest, StopsOnlyAfterTheReadersThatWaitAreAnswered) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  a_->set_ready(false);
  std::thread reader([&] { EXPECT_EQ(ReadAt(path("one", 1), 0, 1).value_or(""), "a"); });
  a_->AwaitFetches(1);
  std::thread stop([&] { fs_.reset(); });
  while (FindMount(target()).value()) std::this_thread::yield();
  a_->Answer(1, absl::OkStatus());
  reader.join();
  stop.join();
}

TEST_F(BlobFsTest, IsOfNoUseToOrdinaryUsers) {
  ASSERT_TRUE(fs_->Add("one", {a_}, stats_).ok());
  EXPECT_THAT(Shell("setpriv --reuid=65534 --clear-groups cat " + path("one", 1) + "; true"),
              testing::HasSubstr("Permission denied"));
}

}  // namespace
}  // namespace lamina::fs
