// SPDX-License-Identifier: Apache-2.0
//
// One suite for the ways in which an image can be mounted: each must show the same.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <thread>

#include "fs/mount/mount.h"
#include "tests/mount/mount_testing.h"
#include "tests/mount/tree_differences.h"

namespace lamina::fs {
namespace {

using chunkstore::RandomBytes;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr size_t kMiB = 1024 * 1024;

class TransportTest : public MountTest, public testing::WithParamInterface<Transport> {
 protected:
  std::unique_ptr<MountedImage> Mount(const TestImage& image) const {
    return MountTest::Mount(image, GetParam());
  }
  std::string file(int number = 1) const { return fmt::format("{}/f{}", target(), number); }
};

INSTANTIATE_TEST_SUITE_P(, TransportTest,
                         testing::Values(Transport::kErofsOnFiles, Transport::kErofsOnLoop,
                                         Transport::kFuseTree),
                         [](const auto& info) { return NameOf(info.param); });

TEST_P(TransportTest, ShowsTheTreeThatTheImageWasMadeOf) {
  const std::string source = MakeDirectory("source");
  MakeSampleTree(source);
  const TestImage image = ImageOf(source);
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);

  EXPECT_THAT(TreeDifferences(source, target()), IsEmpty());
  EXPECT_GT(mounted->stats->missed_requests, 0u);
  EXPECT_EQ(mounted->stats->failed_requests, 0u);
}

TEST_P(TransportTest, HolesAreFoundBySeeking) {
  const std::string source = MakeDirectory("source");
  Shell("truncate -s 4M " + source + "/sparse && dd if=/dev/urandom of=" + source +
        "/sparse bs=4096 count=1 seek=256 conv=notrunc status=none");
  const TestImage image = ImageOf(source);
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);

  const UniqueFd fd(::open((target() + "/sparse").c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  EXPECT_EQ(::lseek(fd.get(), 0, SEEK_DATA), static_cast<off_t>(kMiB));
  EXPECT_EQ(::lseek(fd.get(), 0, SEEK_HOLE), 0);
  const off_t hole = ::lseek(fd.get(), kMiB, SEEK_HOLE);
  EXPECT_GE(hole, static_cast<off_t>(kMiB + 4096));
  EXPECT_LE(hole, static_cast<off_t>(2 * kMiB));
  EXPECT_EQ(::lseek(fd.get(), 3 * kMiB, SEEK_DATA), -1);
  EXPECT_EQ(errno, ENXIO);
  EXPECT_EQ(::lseek(fd.get(), 4 * kMiB, SEEK_HOLE), -1);
  EXPECT_EQ(errno, ENXIO);
}

TEST_P(TransportTest, ReadsOfAnySizeAtAnyOffsetGiveTheContent) {
  const std::string content = RandomBytes(3 * kMiB + 12345, 1);
  const TestImage image = ImageOfFiles({content});
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);

  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const size_t offset = random() % (content.size() + 10'000);
    const size_t length = random() % (i % 10 == 0 ? 2 * kMiB : 20'000);
    const auto got = ReadAt(file(), offset, length);
    ASSERT_TRUE(got.ok()) << got.status();
    const std::string expected =
        offset < content.size() ? content.substr(offset, length) : std::string();
    ASSERT_TRUE(*got == expected) << length << " bytes at " << offset;
    if (i % 50 == 0) DropPages(file());
  }
}

TEST_P(TransportTest, DirectReadsGiveTheContentWhereTheKernelHasThem) {
  const std::string content = RandomBytes(2 * kMiB + 777, 2);
  const TestImage image = ImageOfFiles({content});
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);

  if (GetParam() == Transport::kErofsOnFiles) {
    // The kernel has no direct I/O on EROFS that is mounted from files, and says so on open.
    const auto refused = ReadAt(file(), 0, 4096, O_DIRECT);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    return;
  }
  for (const size_t offset : {size_t{0}, size_t{4096}, 256 * 1024 - size_t{4096}, 2 * kMiB}) {
    for (const size_t length : {size_t{4096}, size_t{12288}, kMiB, 2 * kMiB}) {
      const auto got = ReadAt(file(), offset, length, O_DIRECT);
      ASSERT_TRUE(got.ok()) << got.status() << ": " << length << " bytes at " << offset;
      ASSERT_TRUE(*got == content.substr(offset, length)) << length << " bytes at " << offset;
    }
  }
}

TEST_P(TransportTest, MappedFilesShowTheContent) {
  const std::string content = RandomBytes(kMiB + 100, 3);
  const TestImage image = ImageOfFiles({content});
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);

  const UniqueFd fd(::open(file().c_str(), O_RDONLY | O_CLOEXEC));
  for (const int flags : {MAP_SHARED, MAP_PRIVATE}) {
    void* address = ::mmap(nullptr, content.size(), PROT_READ | PROT_EXEC, flags, fd.get(), 0);
    ASSERT_NE(address, MAP_FAILED);
    EXPECT_EQ(std::memcmp(address, content.data(), content.size()), 0);
    // What follows the end of the file in its last page is zero.
    EXPECT_EQ(static_cast<const char*>(address)[content.size()], 0);
    ::munmap(address, content.size());
  }
}

TEST_P(TransportTest, ManyReadersOfAColdFileFetchItOnce) {
  const std::string content = RandomBytes(4 * kMiB, 4);
  const TestImage image = ImageOfFiles({content});
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);

  std::atomic<int> wrong = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 8; ++i) {
    readers.emplace_back([&, i] {
      const size_t start = static_cast<size_t>(i) * 300'000;
      if (ReadAt(file(), start, content.size()).value_or("") != content.substr(start)) ++wrong;
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(mounted->stats->decompressed_bytes, content.size());
}

TEST_P(TransportTest, AFailingOriginIsAnErrorUntilItReturns) {
  const std::string content = RandomBytes(kMiB, 5);
  const TestImage image = ImageOfFiles({content});
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);

  mounted->origin->FailWith(absl::NotFoundError("the origin is away"));
  const UniqueFd fd(::open(file().c_str(), O_RDONLY | O_CLOEXEC));
  char byte = 0;
  EXPECT_EQ(::pread(fd.get(), &byte, 1, 0), -1);
  EXPECT_EQ(errno, EIO);
  EXPECT_GT(mounted->stats->failed_requests, 0u);

  mounted->origin->FailWith(absl::OkStatus());
  EXPECT_TRUE(ReadAll(file()) == content);
}

TEST_P(TransportTest, AMountInUseIsDetachedOnlyOnRequest) {
  const std::string content = RandomBytes(kMiB, 6);
  const TestImage image = ImageOfFiles({content});
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);
  UniqueFd user(::open(file().c_str(), O_RDONLY | O_CLOEXEC));

  const absl::Status busy = Unmount(target());
  EXPECT_TRUE(absl::IsFailedPrecondition(busy)) << busy;
  EXPECT_THAT(std::string(busy.message()), HasSubstr(target()));
  EXPECT_TRUE(Unmount(target(), /*detach=*/true).ok());
  EXPECT_TRUE(absl::IsNotFound(Unmount(target())));

  // The user goes on as long as it wants to.
  std::string got(content.size(), '\0');
  EXPECT_TRUE(ReadFull(user.get(), 0, std::as_writable_bytes(std::span(got))).ok());
  EXPECT_TRUE(got == content);
}

TEST_P(TransportTest, EndsWhileReadersWaitForTheOrigin) {
  const std::string content = RandomBytes(8 * kMiB, 7);
  const TestImage image = ImageOfFiles({content});
  auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);
  mounted->origin->Hold();
  const auto origin = mounted->origin;
  std::vector<std::thread> readers;
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&, i] {
      // The bytes or an error, never other bytes.
      const size_t start = static_cast<size_t>(i) * 2 * kMiB;
      const auto got = ReadAt(file(), start, kMiB);
      if (got.ok() && *got != content.substr(start, got->size())) ++wrong;
    });
  }
  origin->AwaitHeld(1);
  std::thread end([&] { mounted.reset(); });
  while (FindMount(target()).value()) std::this_thread::yield();
  origin->Release();
  end.join();
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(TransportTest, ReadsGoOnFromTheLayersOfAVeryTallImage) {
  constexpr int kLayers = 127;
  std::vector<std::string> contents;
  for (int i = 0; i < kLayers; ++i) contents.push_back(fmt::format("content of layer {}", i));
  const TestImage image = ImageOfFiles(contents);
  const auto mounted = Mount(image);
  ASSERT_NE(mounted, nullptr);
  for (int i = 0; i < kLayers; ++i) EXPECT_EQ(ReadAll(file(i + 1)), contents[i]);
}

TEST_P(TransportTest, NothingIsLeftAfterManyMounts) {
  const TestImage image = ImageOfFiles({RandomBytes(100'000, 8)});
  { ASSERT_NE(Mount(image), nullptr); }  // what is set up once for good
  const SystemState before = State();
  const int cycles = GetParam() == Transport::kErofsOnLoop ? 50 : 200;
  for (int i = 0; i < cycles; ++i) {
    const auto mounted = Mount(image);
    ASSERT_NE(mounted, nullptr);
    ASSERT_EQ(ReadAt(file(), 0, 10)->size(), 10u);
  }
  SystemState after = State();
  for (int i = 0; i < 100 && after != before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    after = State();
  }
  EXPECT_EQ(after, before);
}

// Kernel and userspace agree in what compare_trees leaves to each file system.
TEST_F(MountTest, FuseTreeShowsTheSameNumbersAsErofs) {
  const std::string source = MakeDirectory("source");
  MakeSampleTree(source);
  const TestImage image = ImageOf(source);
  const auto numbers = [&](Transport transport) {
    const auto mounted = Mount(image, transport);
    return Shell(
        fmt::format("cd '{}' && find . -printf '%p %i %n %b %s %A@ %C@ %m\\n' | sort && "
                    "stat -f -c '%b %a %f %s %c %d %l' . && getfacl -R . && "
                    "getfattr -R -h -d -m - . 2>/dev/null",
                    target()));
  };
  EXPECT_EQ(numbers(Transport::kFuseTree), numbers(Transport::kErofsOnFiles));
}

TEST_F(MountTest, FuseTreeShowsOrdinaryUsersWhatErofsShows) {
  const std::string source = MakeDirectory("source");
  MakeSampleTree(source);
  const TestImage image = ImageOf(source);
  const auto seen = [&](Transport transport, const char* user) {
    const auto mounted = Mount(image, transport);
    return Shell(
        fmt::format("cd '{0}' && setpriv --reuid={1} --regid={1} --clear-groups sh -c '"
                    "cat acl | head -c 5; ls acl-directory; getfattr -d -m - xattrs; "
                    "getfattr -n trusted.secret xattrs; cat fifo </dev/null & "
                    "kill $!; cat linked | wc -c; true'",
                    target(), user));
  };
  // User 1234 is named in the access lists, 65534 is not.
  for (const char* user : {"1234", "65534"}) {
    EXPECT_EQ(seen(Transport::kFuseTree, user), seen(Transport::kErofsOnFiles, user)) << user;
  }
}

}  // namespace
}  // namespace lamina::fs
