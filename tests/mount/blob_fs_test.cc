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
#include <optional>
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
  explicit FakeBlob(char fill)
      : fd_(::memfd_create("blob", MFD_CLOEXEC)),
        descriptor_{.digest = Digest::Of(AsBytes(std::string(1, fill)))} {
    const std::string content(kFileSize, fill);
    EXPECT_TRUE(WriteFull(fd_.get(), 0, AsBytes(content)).ok());
  }

  const chunkstore::LayerDescriptor& descriptor() const override { return descriptor_; }
  uint64_t size() const override { return kFileSize; }
  uint32_t blocks() const override { return kFileSize / chunkstore::kBlockSize; }
  std::span<const std::byte> metadata() const override { return {}; }
  const Digest& content_digest() const override { return descriptor_.digest; }
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
  void FetchBulk(uint32_t, uint32_t, chunkstore::Priority, std::optional<chunkstore::UseTime>,
                 std::shared_ptr<ReadStats>, std::stop_token,
                 std::function<void(absl::Status)> done) override {
    done(absl::OkStatus());
  }
  absl::Status ReadThrough(uint64_t, std::span<std::byte> into, ReadStats&) override {
    if (!reads_through_) return absl::UnavailableError("no origin");
    std::ranges::fill(into, std::byte{'t'});
    return absl::OkStatus();
  }
  bool Present(uint32_t) const override { return ready_; }
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

  std::string path(uint64_t id, int slot) const {
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
  // The kernel closes a file some time after close(2).
  bool UnusedSoon(uint64_t id) const {
    for (int i = 0; i < 500 && fs_->InUse(id); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return !fs_->InUse(id);
  }

  std::unique_ptr<BlobFs> fs_;
  std::shared_ptr<FakeBlob> a_ = std::make_shared<FakeBlob>('a');
  std::shared_ptr<FakeBlob> b_ = std::make_shared<FakeBlob>('b');
  std::shared_ptr<ReadStats> stats_ = std::make_shared<ReadStats>();
};

TEST_F(BlobFsTest, ShowsADirectoryForEachMountWithAFileForEachSlot) {
  EXPECT_THAT(Names(""), ElementsAre("blobs"));
  ASSERT_TRUE(fs_->Add({1, {a_, b_}, stats_}).ok());
  ASSERT_TRUE(fs_->Add({2, {b_}, stats_}).ok());
  EXPECT_THAT(Names(""), ElementsAre("1", "2", "blobs"));
  EXPECT_THAT(Names("/1"), ElementsAre("1", "2"));
  EXPECT_EQ(ReadAt(path(1, 1), 100, 3).value(), "aaa");
  EXPECT_EQ(ReadAt(path(1, 2), 100, 3).value(), "bbb");
  EXPECT_EQ(ReadAt(path(2, 1), 100, 3).value(), "bbb");
  EXPECT_EQ(std::filesystem::file_size(path(1, 1)), kFileSize);
}

TEST_F(BlobFsTest, MachinesOfAllMountsMapOneFileOfABlob) {
  const std::string shared = BlobFs::SharedPath(fs_->mountpoint(), a_->descriptor());
  EXPECT_EQ(::access(shared.c_str(), F_OK), -1);
  ASSERT_TRUE(fs_->Add({1, {a_, b_}, stats_}).ok());
  ASSERT_TRUE(fs_->Add({2, {a_}, std::make_shared<ReadStats>()}).ok());
  EXPECT_EQ(Names("/blobs").size(), 2);
  const auto map = [&] {
    const UniqueFd fd(::open(shared.c_str(), O_RDONLY | O_CLOEXEC));
    return Mapping::OfFile(fd.get(), kFileSize, /*writable=*/false).value();
  };
  std::optional<Mapping> first = map();
  EXPECT_EQ(AsText(first->bytes()), std::string(kFileSize, 'a'));
  const uint64_t read = stats_->read_bytes;
  EXPECT_GE(read, kFileSize);
  {
    const Mapping second = map();
    EXPECT_EQ(AsText(second.bytes()), std::string(kFileSize, 'a'));
    EXPECT_EQ(stats_->read_bytes, read) << "its pages were there";
  }
  EXPECT_EQ(ReadAt(path(1, 1), 0, 4096).value(), std::string(4096, 'a'));
  EXPECT_EQ(stats_->read_bytes, read + 4096) << "other files are not cached twice";

  // A mapping is in use like an open file, and only of the last mount that has the blob.
  fs_->Remove(1);
  EXPECT_TRUE(UnusedSoon(1));
  fs_->Remove(2);
  EXPECT_TRUE(fs_->InUse(2));
  EXPECT_EQ(AsText(first->bytes().first(1)), "a");
  first.reset();
  EXPECT_TRUE(UnusedSoon(2));
  EXPECT_EQ(::access(shared.c_str(), F_OK), -1);
}

TEST_F(BlobFsTest, AnImageMayHaveABlobTwice) {
  const std::string shared = BlobFs::SharedPath(fs_->mountpoint(), a_->descriptor());
  ASSERT_TRUE(fs_->Add({1, {a_, b_, a_}, stats_}).ok());
  ASSERT_TRUE(fs_->Add({2, {a_, a_}, std::make_shared<ReadStats>()}).ok());
  EXPECT_EQ(Names("/blobs").size(), 2);
  EXPECT_EQ(ReadAt(path(1, 3), 0, 4096).value(), std::string(4096, 'a'));
  fs_->Remove(1);
  EXPECT_TRUE(UnusedSoon(1));
  UniqueFd fd(::open(shared.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  fs_->Remove(2);
  EXPECT_TRUE(fs_->InUse(2));
  fd.Reset();
  EXPECT_TRUE(UnusedSoon(2));
  EXPECT_EQ(::access(shared.c_str(), F_OK), -1);
}

TEST_F(BlobFsTest, OtherNamesAreNotThere) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  for (const char* name :
       {"/2", "/01", "/x", "/0", "/1/0", "/1/2", "/1/01", "/1/1x", "/1/x", "/1/-1", "/1/65537",
        "/1/18446744073709551617", "/blobs/1", "/blobs/x"}) {
    EXPECT_EQ(::access((target() + name).c_str(), F_OK), -1) << name;
    EXPECT_EQ(errno, ENOENT) << name;
  }
}

TEST_F(BlobFsTest, IdsMustBeFreeAndInRange) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(fs_->Add({1, {b_}, stats_})));
  EXPECT_EQ(ReadAt(path(1, 1), 0, 1).value(), "a");
  for (const uint64_t id : {uint64_t{0}, uint64_t{1} << 47, UINT64_MAX}) {
    EXPECT_TRUE(absl::IsInvalidArgument(fs_->Add({id, {a_}, stats_}))) << id;
  }
}

TEST_F(BlobFsTest, ReadsEndWithTheFile) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  EXPECT_EQ(ReadAt(path(1, 1), kFileSize - 10, 100).value(), "aaaaaaaaaa");
  EXPECT_EQ(ReadAt(path(1, 1), kFileSize, 100).value(), "");
  EXPECT_EQ(ReadAt(path(1, 1), kFileSize * 2, 100).value(), "");
  EXPECT_EQ(ReadAt(path(1, 1), 0, kFileSize + 1).value(), std::string(kFileSize, 'a'));
}

TEST_F(BlobFsTest, CountsWhatIsReadForTheMountThatReadsIt) {
  const auto other = std::make_shared<ReadStats>();
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  ASSERT_TRUE(fs_->Add({3, {a_}, other}).ok());
  ASSERT_TRUE(ReadAt(path(1, 1), 0, 5000).ok());
  EXPECT_EQ(stats_->read_requests, 1u);
  EXPECT_EQ(stats_->read_bytes, 5000u);
  EXPECT_EQ(stats_->missed_requests, 0u);
  while (stats_->hit_latency.count() == 0) std::this_thread::yield();  // known after the reply
  EXPECT_EQ(stats_->hit_latency.count(), 1u);
  EXPECT_EQ(other->read_requests, 0u);
}

TEST_F(BlobFsTest, AMissIsAnsweredWhenItHasBeenFetched) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  a_->set_ready(false);
  std::thread reader(
      [&] { EXPECT_EQ(ReadAt(path(1, 1), 0, 300'000).value(), std::string(300'000, 'a')); });
  a_->Answer(1, absl::OkStatus());
  reader.join();
  EXPECT_EQ(stats_->missed_requests, 1u);
  EXPECT_EQ(stats_->failed_requests, 0u);
}

TEST_F(BlobFsTest, AFailedFetchIsEioWhateverTheReason) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  a_->set_ready(false);
  for (const absl::Status& reason :
       {absl::NotFoundError("gone"), absl::ResourceExhaustedError("disk full"),
        absl::DataLossError("wrong digest"), absl::PermissionDeniedError("token expired")}) {
    std::thread reader([&] {
      const UniqueFd fd(::open(path(1, 1).c_str(), O_RDONLY | O_CLOEXEC));
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
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  a_->set_ready(false);
  a_->set_reads_through();
  std::thread reader([&] { EXPECT_EQ(ReadAt(path(1, 1), 5, 3).value_or(""), "ttt"); });
  a_->Answer(1, absl::ResourceExhaustedError("disk full"));
  reader.join();
  EXPECT_EQ(stats_->failed_requests, 0u);
}

TEST_F(BlobFsTest, WaitingReadersDoNotHoldUpOthers) {
  constexpr size_t kWaiting = 64;  // more than there are threads
  ASSERT_TRUE(fs_->Add({1, {a_, b_}, stats_}).ok());
  a_->set_ready(false);
  std::vector<std::thread> readers;
  for (size_t i = 0; i < kWaiting; ++i) {
    readers.emplace_back([&] { EXPECT_EQ(ReadAt(path(1, 1), 0, 10)->size(), 10u); });
  }
  a_->AwaitFetches(kWaiting);
  EXPECT_EQ(ReadAt(path(1, 2), 0, 1).value(), "b");
  a_->Answer(kWaiting, absl::OkStatus());
  for (std::thread& reader : readers) reader.join();
}

TEST_F(BlobFsTest, OpenFilesOutliveTheRemovalOfTheirMount) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  UniqueFd fd(::open(path(1, 1).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  EXPECT_TRUE(fs_->InUse(1));
  fs_->Remove(1);
  EXPECT_THAT(Names(""), ElementsAre("blobs"));
  EXPECT_EQ(::access(path(1, 1).c_str(), F_OK), -1);
  char byte = 0;
  EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), 1);
  EXPECT_EQ(byte, 'a');
  EXPECT_TRUE(fs_->InUse(1));
  EXPECT_TRUE(absl::IsAlreadyExists(fs_->Add({1, {b_}, stats_})));
  fd.Reset();
  EXPECT_TRUE(UnusedSoon(1));
  ASSERT_TRUE(fs_->Add({1, {b_}, stats_}).ok());
  EXPECT_EQ(ReadAt(path(1, 1), 0, 1).value(), "b");
}

TEST_F(BlobFsTest, LetsGoOfBlobsThatNobodyUsesAnyMore) {
  auto owned = std::make_shared<FakeBlob>('a');
  const std::weak_ptr<FakeBlob> blob = owned;
  ASSERT_TRUE(fs_->Add({1, {std::move(owned)}, stats_}).ok());
  ASSERT_TRUE(ReadAt(path(1, 1), 0, 1).ok());
  fs_->Remove(1);
  EXPECT_TRUE(UnusedSoon(1));
  EXPECT_TRUE(blob.expired());
}

TEST_F(BlobFsTest, ManyCyclesOfAddAndRemoveUnderLoad) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        const auto got = ReadAt(path(1, 1), 4096, 8192);
        if (got.ok()) {
          EXPECT_TRUE(*got == std::string(8192, 'a'));
        } else {
          EXPECT_TRUE(absl::IsNotFound(got.status())) << got.status();
        }
      }
    });
  }
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
    ASSERT_TRUE(fs_->Add({2, {b_}, stats_}).ok());
    fs_->Remove(1);
    fs_->Remove(2);
    ASSERT_TRUE(UnusedSoon(1) && UnusedSoon(2));
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

TEST_F(BlobFsTest, FilesInUseGiveErrorsOnceItHasStopped) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  const UniqueFd fd(::open(path(1, 1).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  fs_.reset();
  char byte = 0;
  EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), -1);
  EXPECT_FALSE(FindMount(target()).value().has_value());
}

TEST_F(BlobFsTest, StopsOnlyAfterTheReadersThatWaitAreAnswered) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  a_->set_ready(false);
  std::thread reader([&] { EXPECT_EQ(ReadAt(path(1, 1), 0, 1).value_or(""), "a"); });
  a_->AwaitFetches(1);
  std::thread stop([fs = std::move(fs_)]() mutable { fs.reset(); });
  while (FindMount(target()).value()) std::this_thread::yield();
  a_->Answer(1, absl::OkStatus());
  reader.join();
  stop.join();
}

TEST_F(BlobFsTest, IsOfNoUseToOrdinaryUsers) {
  ASSERT_TRUE(fs_->Add({1, {a_}, stats_}).ok());
  EXPECT_THAT(Shell("setpriv --reuid=65534 --clear-groups cat " + path(1, 1) + "; true"),
              testing::HasSubstr("Permission denied"));
}

// What the process after a killed one does: the descriptor is duplicated as a holder would have it.
class TakeOverTest : public BlobFsTest {
 protected:
  // Ends the file system as a process that is killed does, and leaves what its successor gets.
  FuseHandover Leave() {
    FuseHandover handover{UniqueFd(::fcntl(fs_->device(), F_DUPFD_CLOEXEC, 0)), fs_->state()};
    fs_->LeaveMounted();
    fs_.reset();
    return handover;
  }
  void TakeOver(FuseHandover handover, std::vector<BlobFs::Directory> directories,
                std::vector<BlobFs::Directory> removed = {}) {
    auto fs =
        BlobFs::TakeOver(target(), std::move(handover), std::move(directories), std::move(removed));
    ASSERT_TRUE(fs.ok()) << fs.status();
    fs_ = *std::move(fs);
  }
};

TEST_F(TakeOverTest, OpenFilesAreReadOn) {
  ASSERT_TRUE(fs_->Add({7, {a_, b_}, stats_}).ok());
  const UniqueFd fd(::open(path(7, 2).c_str(), O_RDONLY | O_CLOEXEC));
  for (int life = 0; life < 3; ++life) {
    TakeOver(Leave(), {{7, {a_, b_}, stats_}});
    char byte = 0;
    EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), 1);
    EXPECT_EQ(byte, 'b');
    EXPECT_EQ(ReadAt(path(7, 1), 0, 1).value(), "a");
    EXPECT_THAT(Names("/7"), ElementsAre("1", "2"));
  }
}

TEST_F(TakeOverTest, RequestsWaitForTheSuccessor) {
  ASSERT_TRUE(fs_->Add({7, {a_}, stats_}).ok());
  const std::string file = path(7, 1);
  const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  FuseHandover handover = Leave();
  std::atomic<bool> answered = false;
  std::thread reader([&] {
    char byte = 0;
    EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), 1);
    EXPECT_EQ(byte, 'a');
    EXPECT_EQ(ReadAt(file, 0, 1).value(), "a");
    answered = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(answered);
  TakeOver(std::move(handover), {{7, {a_}, stats_}});
  reader.join();
}

TEST_F(TakeOverTest, RequestsThatWereReadAndNotAnsweredAreAskedAgain) {
  ASSERT_TRUE(fs_->Add({7, {a_}, stats_}).ok());
  const UniqueFd fd(::open(path(7, 1).c_str(), O_RDONLY | O_CLOEXEC));
  FuseHandover handover = Leave();
  std::thread reader([&] {
    std::string content(100'000, '\0');
    EXPECT_EQ(::pread(fd.get(), content.data(), content.size(), 0), 100'000);
    EXPECT_EQ(content, std::string(100'000, 'a'));
  });
  // As a process does that is killed before it answers.
  std::string request(1 << 21, '\0');
  ssize_t length = -1;
  while (length < 0) length = ::read(handover.device.get(), request.data(), request.size());
  TakeOver(std::move(handover), {{7, {a_}, stats_}});
  reader.join();
}

TEST_F(TakeOverTest, WithoutResendingTheyGetAnErrorAndNothingElseDoes) {
  ASSERT_TRUE(fs_->Add({7, {a_}, stats_}).ok());
  const UniqueFd fd(::open(path(7, 1).c_str(), O_RDONLY | O_CLOEXEC));
  FuseHandover handover = Leave();
  std::thread reader([&] {
    char byte = 0;
    EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), -1);
    EXPECT_EQ(errno, ECONNABORTED);
  });
  std::string request(1 << 21, '\0');
  ssize_t length = -1;
  while (length < 0) length = ::read(handover.device.get(), request.data(), request.size());
  handover.can_resend = false;
  TakeOver(std::move(handover), {{7, {a_}, stats_}});
  EXPECT_TRUE(fs_->has_new_device());
  reader.join();
  EXPECT_EQ(ReadAt(path(7, 1), 0, 1).value(), "a");
  char byte = 0;
  EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), 1);
  // And once more, with what is the connection's descriptor now.
  TakeOver(Leave(), {{7, {a_}, stats_}});
  EXPECT_FALSE(fs_->has_new_device());
  EXPECT_EQ(ReadAt(path(7, 1), 0, 1).value(), "a");
}

TEST_F(TakeOverTest, RemovedMountsAreServedToTheirLastUser) {
  ASSERT_TRUE(fs_->Add({7, {a_}, stats_}).ok());
  UniqueFd fd(::open(path(7, 1).c_str(), O_RDONLY | O_CLOEXEC));
  fs_->Remove(7);
  TakeOver(Leave(), {{8, {b_}, stats_}}, {{7, {a_}, stats_}});
  EXPECT_THAT(Names(""), ElementsAre("8", "blobs"));
  char byte = 0;
  EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), 1);
  EXPECT_EQ(byte, 'a');
  EXPECT_TRUE(fs_->InUse(7));
  fd.Reset();
  EXPECT_TRUE(UnusedSoon(7));
  EXPECT_TRUE(fs_->InUse(8));
}

TEST_F(TakeOverTest, ReadersGetAnErrorOnceNobodyHasTheDescriptor) {
  ASSERT_TRUE(fs_->Add({7, {a_}, stats_}).ok());
  const UniqueFd fd(::open(path(7, 1).c_str(), O_RDONLY | O_CLOEXEC));
  FuseHandover handover = Leave();
  std::thread reader([&] {
    char byte = 0;
    EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), -1);
    EXPECT_TRUE(errno == ECONNABORTED || errno == ENOTCONN) << errno;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  handover.device.Reset();
  reader.join();
  EXPECT_TRUE(Unmount(target(), /*detach=*/true).ok());
}

TEST_F(TakeOverTest, AConnectionThatIsGoneIsUnavailable) {
  FuseHandover handover = Leave();
  ASSERT_TRUE(Unmount(target()).ok());
  EXPECT_TRUE(
      absl::IsUnavailable(BlobFs::TakeOver(target(), std::move(handover), {}, {}).status()));
}

TEST_F(TakeOverTest, StateThatIsDamagedIsRefused) {
  FuseHandover handover = Leave();
  const std::string state = handover.state;
  for (const std::string& damaged :
       {std::string(), std::string("2") + state.substr(1), state.substr(0, state.size() / 2),
        state + "0", state + "00", state.substr(0, state.size() - 2) + "xx"}) {
    FuseHandover copy{UniqueFd(::fcntl(handover.device.get(), F_DUPFD_CLOEXEC, 0)), damaged};
    EXPECT_TRUE(absl::IsDataLoss(BlobFs::TakeOver(target(), std::move(copy), {}, {}).status()))
        << damaged;
  }
  TakeOver(std::move(handover), {});  // nothing was harmed
}

}  // namespace
}  // namespace lamina::fs
