// SPDX-License-Identifier: Apache-2.0
//
// Uppers that the kernel's overlayfs made, and some that it would not.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstring>
#include <functional>

#include "chunkstore/base/file.h"
#include "erofs/import.h"
#include "tests/erofs/import_testing.h"

namespace lamina::erofs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ImportUpperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "overlayfs and devices need root";
    absl::StatusOr<TemporaryDirectory> directory =
        TemporaryDirectory::Create(::testing::TempDir(), "import-upper");
    ASSERT_TRUE(directory.ok()) << directory.status();
    directory_.emplace(*std::move(directory));
    Do("umask 022; mkdir lower upper work merged; chmod 755 upper");
  }
  void TearDown() override {
    if (directory_) ::umount2(Path("merged").c_str(), MNT_DETACH);
  }

  std::string Path(std::string_view name) const {
    return fmt::format("{}/{}", directory_->path(), name);
  }
  void Do(const std::string& commands) {
    Shell(fmt::format("cd {} && {}", directory_->path(), commands));
  }
  // Makes lower files, mounts, and changes what is mounted.
  void Overlay(const std::string& lower, const std::string& changes,
               const std::string& options = "metacopy=off,redirect_dir=nofollow") {
    Do("umask 022; cd lower && " + lower);
    Do("mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work," + options +
       " merged");
    Do("umask 022; cd merged && " + changes);
  }
  Tree Import(const UpperOptions& options = {}) {
    absl::StatusOr<Tree> tree = ImportUpper(Path("upper"), sink_, options);
    EXPECT_TRUE(tree.ok()) << tree.status();
    return tree.ok() ? *std::move(tree) : Tree();
  }
  std::string Lines(const UpperOptions& options = {}) {
    return Describe(Import(options), sink_, {.root = false, .mtime = false});
  }
  std::string Refusal(const UpperOptions& options = {}) {
    const absl::Status status = ImportUpper(Path("upper"), sink_, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  }

  std::optional<TemporaryDirectory> directory_;
  RecordingSink sink_;
};

TEST_F(ImportUpperTest, WhatWasRemovedIsWhitedOutAndWhatWasReplacedIsOpaque) {
  Overlay(
      "mkdir gone replaced kept; printf 1 > gone/f; printf 2 > replaced/f; printf 3 > kept/f; "
      "printf 4 > file; printf 5 > become",
      "rm -r gone file; rm -r replaced; mkdir replaced; printf new > replaced/g; rm kept/f; "
      "rm become; mkdir become");
  EXPECT_EQ(Lines(),
            "/become directory 0755 0:0 trusted.overlay.opaque=y\n"
            "/file character 0000 0:0 0:0\n"
            "/gone character 0000 0:0 0:0 linked to /file\n"
            "/kept directory 0755 0:0\n"
            "/kept/f character 0000 0:0 0:0 linked to /file\n"
            "/replaced directory 0755 0:0 trusted.overlay.opaque=y\n"
            "/replaced/g file 0644 0:0 3 bytes \"new\"\n");
}

TEST_F(ImportUpperTest, EveryKindOfFileKeepsItsAttributes) {
  Overlay("printf lower > copied",
          R"(printf more >> copied; mkfifo -m 600 p; mknod c c 1 3; mknod b b 259 5; ln -s to l
             python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("s")'
             printf abc > f; ln f h; chown 7:8 f; chmod 4711 f; setfattr -n user.a -v 1 f
             setfattr -n trusted.b -v 2 f; touch -d @5.25 f)");
  const Tree tree = Import();
  EXPECT_EQ(Describe(tree, sink_, {.root = false, .mtime = false}),
            "/b block 0644 0:0 259:5\n"
            "/c character 0644 0:0 1:3\n"
            "/copied file 0644 0:0 9 bytes \"lowermore\"\n"
            "/f file 4711 7:8 3 bytes \"abc\" trusted.b=2 user.a=1\n"
            "/h file 4711 7:8 3 bytes \"abc\" trusted.b=2 user.a=1 linked to /f\n"
            "/l symlink 0777 0:0 -> to\n"
            "/p fifo 0600 0:0\n"
            "/s socket 0755 0:0\n");
  EXPECT_EQ(At(tree, "f").mtime, (Timestamp{5, 250'000'000}));
}

TEST_F(ImportUpperTest, HolesStayHoles) {
  Do("truncate -s 3M upper/sparse");
  EXPECT_EQ(At(Import(), "sparse").size, 3u << 20);
  EXPECT_EQ(sink_.hole_bytes(), 3u << 20);
}

TEST_F(ImportUpperTest, MarksThatReferToOtherFilesAreRefusedByName) {
  Overlay("printf x > f", "chmod 600 f", "metacopy=on,redirect_dir=on");
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("upper/f"), HasSubstr("trusted.overlay.metacopy")));
}

TEST_F(ImportUpperTest, RenamedDirectoriesAreRefusedByName) {
  Overlay("mkdir d; printf x > d/f", "mv d e", "metacopy=off,redirect_dir=on");
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("upper/e"), HasSubstr("trusted.overlay.redirect")));
}

TEST_F(ImportUpperTest, MarksOfAnOverlayOnTheOverlayAreRefused) {
  Do("mkdir upper/d; setfattr -n trusted.overlay.overlay.opaque -v y upper/d");
  EXPECT_THAT(Refusal(), HasSubstr("trusted.overlay.overlay.opaque"));
}

TEST_F(ImportUpperTest, WhiteoutsOfTheXattrFormBecomeDevices) {
  Do("mkdir upper/d; : > upper/d/w; setfattr -n trusted.overlay.whiteout -v y upper/d/w; "
     "setfattr -n trusted.overlay.opaque -v x upper/d");
  EXPECT_EQ(Lines(), "/d directory 0755 0:0\n/d/w character 0000 0:0 0:0\n");
}

TEST_F(ImportUpperTest, OnlyMarksOfTheKindThatTheMountHasCount) {
  Do("mkdir upper/d upper/e; setfattr -n user.overlay.opaque -v y upper/d; "
     "setfattr -n user.overlay.redirect -v /x upper/d; "
     "setfattr -n trusted.overlay.opaque -v y upper/e");
  EXPECT_EQ(Lines(), "/d directory 0755 0:0\n/e directory 0755 0:0 trusted.overlay.opaque=y\n");
  EXPECT_THAT(Refusal({.user_xattrs = true}), HasSubstr("user.overlay.redirect"));
  Do("setfattr -x user.overlay.redirect upper/d");
  EXPECT_EQ(Lines({.user_xattrs = true}),
            "/d directory 0755 0:0 trusted.overlay.opaque=y\n/e directory 0755 0:0\n");
}

// Counts bytes, and calls a function when the first of them arrive.
class WatchedSink : public RecordingSink {
 public:
  absl::Status Append(std::span<const std::byte> data) override {
    bytes += data.size();
    if (on_first) std::exchange(on_first, nullptr)();
    return RecordingSink::Append(data);
  }
  uint64_t bytes = 0;
  std::function<void()> on_first;
};

class PausedImportTest : public ImportUpperTest {
 protected:
  // Files are older than the steps of the file system's times.
  void Settle() { ::usleep(100'000); }
  Tree Import(const std::function<void()>& in_pause) {
    const auto pause = [&] {
      ++pauses_;
      bytes_before_ = sink_.bytes;
      in_pause();
      return absl::OkStatus();
    };
    absl::StatusOr<Tree> tree = ImportUpper(Path("upper"), sink_, {.pause = pause});
    EXPECT_TRUE(tree.ok()) << tree.status();
    EXPECT_EQ(pauses_, 1);
    return tree.ok() ? *std::move(tree) : Tree();
  }
  std::string Content(const Tree& tree, std::string_view path) {
    return sink_.Read(At(tree, path));
  }

  WatchedSink sink_;
  int pauses_ = 0;
  uint64_t bytes_before_ = 0;
};

TEST_F(PausedImportTest, ContentThatDoesNotChangeIsReadBeforeThePause) {
  Do("printf old > upper/a; mkdir upper/d; head -c 3000000 /dev/urandom > upper/d/b; "
     "cp upper/d/b copy");
  Settle();
  const Tree tree = Import([&] { Do("chmod 750 upper/d; setfattr -n user.x -v y upper/d"); });
  EXPECT_EQ(bytes_before_, 3000003u);
  EXPECT_EQ(sink_.bytes, bytes_before_);
  EXPECT_EQ(At(tree, "d").mode & 07777, 0750);
  EXPECT_EQ(XattrOf(At(tree, "d"), "user.x"), "y");
  EXPECT_TRUE(Content(tree, "d/b") == Shell("cat " + Path("copy")));
}

TEST_F(PausedImportTest, WhatChangesBeforeThePauseIsReadAgain) {
  Do("printf old > upper/a; printf same > upper/b; printf x > upper/gone; printf 1 > upper/moved");
  Settle();
  const Tree tree = Import(
      [&] { Do("cd upper && printf new > a && rm gone && mv moved there && printf 2 > made"); });
  EXPECT_EQ(Content(tree, "a"), "new");
  EXPECT_EQ(Content(tree, "b"), "same");
  EXPECT_EQ(Content(tree, "there"), "1");
  EXPECT_EQ(Content(tree, "made"), "2");
  EXPECT_FALSE(Exists(tree, "gone"));
  EXPECT_FALSE(Exists(tree, "moved"));
}

// The file was changed so recently that its time may not tell of another change.
TEST_F(PausedImportTest, WhatHasJustChangedIsReadAgain) {
  for (int i = 0; i < 50; ++i) {
    const std::string content = std::to_string(100 + i);
    WriteTestFile(Path("upper/f"), "xxx");
    pauses_ = 0;
    const Tree tree = Import([&] { WriteTestFile(Path("upper/f"), content); });
    ASSERT_EQ(Content(tree, "f"), content);
  }
}

TEST_F(PausedImportTest, StoresToMappedFilesAreNotMissed) {
  Do("head -c 1000000 /dev/zero > upper/f");
  absl::StatusOr<UniqueFd> file = OpenFile(Path("upper/f"), O_RDWR);
  ASSERT_TRUE(file.ok());
  absl::StatusOr<Mapping> mapping = Mapping::OfFile(file->get(), 1000000, /*writable=*/true);
  ASSERT_TRUE(mapping.ok());
  // The page is dirty and mapped writable: stores to it fault no more, and leave times alone.
  std::memcpy(mapping->bytes().data() + 5000, "first", 5);
  Settle();
  const Tree tree = Import([&] { std::memcpy(mapping->bytes().data() + 5000, "other", 5); });
  EXPECT_EQ(Content(tree, "f").substr(5000, 5), "other");
}

TEST_F(PausedImportTest, WhatMovesDuringTheFirstReadingDoesNoHarm) {
  Do("cd upper; mkdir -p a/b/c z; head -c 600000 /dev/zero > a/b/c/f; printf z > z/f; printf y > "
     "y");
  Settle();
  sink_.on_first = [&] { Do("truncate -s 10 upper/a/b/c/f; mv upper/a/b moved; rm upper/y"); };
  const Tree tree = Import([&] { Do("mv moved upper/q"); });
  EXPECT_EQ(Content(tree, "q/c/f"), std::string(10, '\0'));
  EXPECT_EQ(Content(tree, "z/f"), "z");
  EXPECT_FALSE(Exists(tree, "y"));
}

TEST_F(PausedImportTest, WhereStoresAreNotNotedAllIsReadInThePause) {
  Do("mount -t tmpfs tmpfs merged && rmdir upper && mkdir merged/upper && ln -s merged/upper upper "
     "&& printf old > upper/f");
  Settle();
  const Tree tree = Import([] {});
  EXPECT_EQ(bytes_before_, 0u);
  EXPECT_EQ(Content(tree, "f"), "old");
}

TEST_F(PausedImportTest, APauseThatFailsEndsTheImport) {
  Do("printf x > upper/f");
  const absl::Status status =
      ImportUpper(Path("upper"), sink_,
                  {.pause = [] { return absl::DeadlineExceededError("they do not stop"); }})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ImportUpperTest, FileThatChangesWithNobodyPausedIsAnErrorThatNamesIt) {
  Do("head -c 1000000 /dev/zero > upper/f");
  WatchedSink sink;
  sink.on_first = [&] { Do("printf x >> upper/f"); };
  const absl::Status status = ImportUpper(Path("upper"), sink, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("upper/f"), HasSubstr("changed")));
}

}  // namespace
}  // namespace lamina::erofs
