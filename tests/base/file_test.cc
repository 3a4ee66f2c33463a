// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/base/directory_testing.h"

namespace lamina {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

class FileTest : public DirectoryTest {};

TEST_F(FileTest, UniqueFdClosesWhatItOwns) {
  int number = -1;
  {
    auto fd = OpenFile(Path("f"), O_RDWR | O_CREAT);
    ASSERT_EQ(fd.status(), absl::OkStatus());
    number = fd->get();
    UniqueFd moved = *std::move(fd);
    EXPECT_FALSE(fd->valid());
    EXPECT_TRUE(IsOpen(number));
  }
  EXPECT_FALSE(IsOpen(number));
}

TEST_F(FileTest, UniqueFdReleasesAndReplaces) {
  UniqueFd fd(*OpenFile(Path("f"), O_RDWR | O_CREAT));
  const int first = fd.get();
  UniqueFd second(fd.Release());
  EXPECT_FALSE(fd.valid());
  EXPECT_TRUE(IsOpen(first));
  second = *OpenFile(Path("g"), O_RDWR | O_CREAT);
  EXPECT_FALSE(IsOpen(first));
  second.Reset();
  EXPECT_FALSE(second.valid());
}

TEST_F(FileTest, OpenedFilesDoNotLeakIntoPrograms) {
  const UniqueFd fd(*OpenFile(Path("f"), O_RDWR | O_CREAT, 0600));
  EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  struct stat info {};
  ASSERT_EQ(::fstat(fd.get(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600);
}

TEST_F(FileTest, OpenErrorNamesThePath) {
  EXPECT_EQ(OpenFile(Path("none"), O_RDONLY).status(),
            absl::NotFoundError("open " + Path("none") + ": No such file or directory"));
}

TEST_F(FileTest, ReadsAndWritesAtOffsets) {
  const UniqueFd fd(*OpenFile(Path("f"), O_RDWR | O_CREAT));
  ASSERT_EQ(WriteFull(fd.get(), 3, AsBytes("abcdef")), absl::OkStatus());
  ASSERT_EQ(WriteFull(fd.get(), 0, {}), absl::OkStatus());
  EXPECT_EQ(*FileSize(fd.get()), 9);
  std::string into(4, 'x');
  ASSERT_EQ(ReadFull(fd.get(), 5, std::as_writable_bytes(std::span(into))), absl::OkStatus());
  EXPECT_EQ(into, "cdef");
}

TEST_F(FileTest, ReadingPastTheEndIsDataLoss) {
  const UniqueFd fd(*OpenFile(Path("f"), O_RDWR | O_CREAT));
  ASSERT_EQ(WriteFull(fd.get(), 0, AsBytes("abc")), absl::OkStatus());
  std::string into(5, 'x');
  EXPECT_EQ(ReadFull(fd.get(), 1, std::as_writable_bytes(std::span(into))),
            absl::DataLossError("end of file at 3, 3 bytes missing"));
}

TEST_F(FileTest, FailedReadsAndWritesSayWhatAndWhere) {
  std::string into(5, 'x');
  EXPECT_THAT(std::string(ReadFull(-1, 7, std::as_writable_bytes(std::span(into))).message()),
              StartsWith("read 5 bytes at 7: "));
  const UniqueFd full(*OpenFile("/dev/full", O_WRONLY));
  EXPECT_EQ(WriteFull(full.get(), 9, AsBytes("abc")),
            absl::ResourceExhaustedError("write 3 bytes at 9: No space left on device"));
}

TEST_F(FileTest, WholeFilesAreReadUpToALimit) {
  ASSERT_EQ(WriteFileAtomically(Path("f"), "content"), absl::OkStatus());
  EXPECT_EQ(*ReadFileToString(Path("f"), 7), "content");
  EXPECT_EQ(ReadFileToString(Path("f"), 6).status(),
            absl::ResourceExhaustedError(Path("f") + ": 7 bytes, more than the 6 allowed"));
  EXPECT_EQ(ReadFileToString(Path("none"), 6).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(FileTest, AtomicWriteReplacesTheFileAndSetsItsMode) {
  ASSERT_EQ(WriteFileAtomically(Path("f"), "old"), absl::OkStatus());
  const UniqueFd reader(*OpenFile(Path("f"), O_RDONLY));
  ASSERT_EQ(WriteFileAtomically(Path("f"), "new content", 0640), absl::OkStatus());
  EXPECT_EQ(*ReadFileToString(Path("f"), 100), "new content");
  EXPECT_EQ(*FileSize(reader.get()), 3) << "who has the old file open keeps it";
  EXPECT_EQ(std::filesystem::status(Path("f")).permissions(), std::filesystem::perms{0640});
  EXPECT_THAT(Names(), ElementsAre("f"));
}

TEST_F(FileTest, FailedAtomicWriteLeavesNothingBehind) {
  std::filesystem::create_directory(Path("f"));  // a file cannot be renamed over it
  const absl::Status status = WriteFileAtomically(Path("f"), "content");
  EXPECT_THAT(std::string(status.message()), HasSubstr("write " + Path("f") + ": rename"));
  EXPECT_THAT(Names(), ElementsAre("f"));
  EXPECT_FALSE(WriteFileAtomically(Path("none/f"), "content").ok());
}

TEST_F(FileTest, MappingIsTheFile) {
  const UniqueFd fd(*OpenFile(Path("f"), O_RDWR | O_CREAT));
  ASSERT_EQ(WriteFull(fd.get(), 0, AsBytes("abcdef")), absl::OkStatus());
  auto mapping = Mapping::OfFile(fd.get(), 4, /*writable=*/true);
  ASSERT_EQ(mapping.status(), absl::OkStatus());
  EXPECT_EQ(AsText(mapping->bytes()), "abcd");
  mapping->bytes()[0] = std::byte{'X'};
  const Mapping moved = *std::move(mapping);
  EXPECT_TRUE(mapping->bytes().empty());
  EXPECT_EQ(AsText(moved.bytes()), "Xbcd");
  EXPECT_EQ(*ReadFileToString(Path("f"), 100), "Xbcdef");
}

TEST_F(FileTest, MappingMoreThanTheFileHasIsRefused) {
  const UniqueFd fd(*OpenFile(Path("f"), O_RDWR | O_CREAT));
  ASSERT_EQ(WriteFull(fd.get(), 0, AsBytes("abc")), absl::OkStatus());
  EXPECT_EQ(Mapping::OfFile(fd.get(), 4, false).status(),
            absl::DataLossError("file has 3 bytes, needs 4"));
}

TEST_F(FileTest, EmptyMappingsAreFine) {
  EXPECT_THAT(Mapping::OfFile(-1, 0, false)->bytes(), IsEmpty());
  EXPECT_THAT(Mapping::Anonymous(0)->bytes(), IsEmpty());
}

TEST_F(FileTest, AnonymousMemoryIsZeroedAndAligned) {
  auto memory = Mapping::Anonymous(10000);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  EXPECT_EQ(AsText(memory->bytes()), std::string(10000, '\0'));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->bytes().data()) % 4096, 0);
  EXPECT_EQ(Mapping::Anonymous(uint64_t{1} << 60).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(FileTest, TemporaryDirectoryGoesWithEverythingInIt) {
  std::string path;
  {
    auto temporary = TemporaryDirectory::Create(directory_->path(), "building-");
    ASSERT_EQ(temporary.status(), absl::OkStatus());
    path = temporary->path();
    EXPECT_THAT(path, StartsWith(Path("building-")));
    std::filesystem::create_directories(path + "/a/b");
    ASSERT_EQ(WriteFileAtomically(path + "/a/b/c", "content"), absl::OkStatus());
    const TemporaryDirectory moved = *std::move(temporary);
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_F(FileTest, KeptDirectoryStays) {
  std::string path;
  {
    auto temporary = TemporaryDirectory::Create(directory_->path(), "kept-");
    ASSERT_EQ(temporary.status(), absl::OkStatus());
    path = temporary->Keep();
  }
  EXPECT_TRUE(std::filesystem::is_directory(path));
}

TEST_F(FileTest, TemporaryDirectoryNeedsItsParent) {
  EXPECT_EQ(TemporaryDirectory::Create(Path("none"), "x").status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace lamina
