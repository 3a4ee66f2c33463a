// SPDX-License-Identifier: Apache-2.0
//
// What the entries of an archive become: types, paths, replacement, links.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/sysmacros.h>
#include <algorithm>

#include "erofs/import.h"
#include "erofs/merge.h"
#include "tests/erofs/import_testing.h"

namespace lamina::erofs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ImportTarTest : public TarImportFixture {
 protected:
  std::string Paths(std::string_view archive) {
    return Describe(Import(archive), sink_, {.root = false, .mtime = false});
  }
};

TEST_F(ImportTarTest, EveryFileTypeKeepsItsAttributes) {
  TarWriter tar;
  tar.Add({.name = "dir", .type = '5', .mode = 01777, .uid = 1, .gid = 2, .mtime = 10});
  tar.Add({.name = "dir/file", .mode = 06755, .uid = 3, .gid = 4, .mtime = 11, .content = "abc"});
  tar.Add({.name = "dir/old", .type = '\0', .mode = 0600, .content = "v7"});
  tar.Add({.name = "dir/contiguous", .type = '7', .content = "c"});
  tar.Add({.name = "fifo", .type = '6', .mode = 0620});
  tar.Add({.name = "link", .type = '2', .mode = 0600, .link = "dir/file"});
  tar.Add({.name = "null", .type = '3', .mode = 0666, .major = 1, .minor = 3});
  tar.Add({.name = "sda", .type = '4', .mode = 0660, .gid = 6, .major = 259, .minor = 1048575});
  const Tree tree = Import(tar.Finish());
  EXPECT_EQ(Describe(tree, sink_, {.root = false}),
            "/dir directory 1777 1:2 10.000000000\n"
            "/dir/contiguous file 0644 0:0 0.000000000 1 bytes \"c\"\n"
            "/dir/file file 6755 3:4 11.000000000 3 bytes \"abc\"\n"
            "/dir/old file 0600 0:0 0.000000000 2 bytes \"v7\"\n"
            "/fifo fifo 0620 0:0 0.000000000\n"
            "/link symlink 0777 0:0 0.000000000 -> dir/file\n"
            "/null character 0666 0:0 0.000000000 1:3\n"
            "/sda block 0660 0:6 0.000000000 259:1048575\n");
}

TEST_F(ImportTarTest, EmptyArchiveIsAnEmptyRoot) {
  EXPECT_EQ(Describe(Import(""), sink_), "/ directory 0755 0:0 0.000000000\n");
  EXPECT_EQ(Describe(Import(TarWriter().Finish()), sink_), "/ directory 0755 0:0 0.000000000\n");
}

TEST_F(ImportTarTest, DotEntrySetsAttributesOfTheRoot) {
  for (const char* name : {".", "./", "/", "a/.."}) {
    TarWriter tar;
    tar.Add({.name = name, .type = '5', .mode = 0700, .uid = 5, .gid = 6, .mtime = 7});
    EXPECT_EQ(Describe(Import(tar.Finish()), sink_), "/ directory 0700 5:6 7.000000000\n") << name;
  }
}

TEST_F(ImportTarTest, RootThatIsNoDirectoryIsRefused) {
  EXPECT_THAT(Error(TarWriter().File(".").Finish()), HasSubstr("root can only be a directory"));
  EXPECT_THAT(Error(TarWriter().File("f").HardLink(".", "f").Finish()),
              HasSubstr("root can only be a directory"));
}

TEST_F(ImportTarTest, FileContentOfAnySizeArrivesWhateverThePieces) {
  for (size_t size : {0, 1, 511, 512, 513, 4095, 4096, 4097, 262143, 262144, 262145, 700001}) {
    std::string content(size, '\0');
    for (size_t i = 0; i < size; ++i) content[i] = static_cast<char>(i * 7 + i / 251);
    const std::string archive = TarWriter().File("a", content).File("b", "after").Finish();
    for (size_t piece : {size_t{1}, size_t{1000}, size_t{1} << 20}) {
      if (piece == 1 && size > 5000) continue;
      RecordingSink sink;
      const absl::StatusOr<Tree> tree = ImportBytes(archive, sink, piece);
      ASSERT_TRUE(tree.ok()) << tree.status();
      EXPECT_EQ(At(*tree, "a").size, size);
      EXPECT_EQ(sink.Read(At(*tree, "a")), content) << size;
      EXPECT_EQ(sink.Read(At(*tree, "b")), "after");
    }
  }
}

TEST_F(ImportTarTest, NamesWithDotSlashAndLeadingSlashesAreBelowTheRoot) {
  EXPECT_EQ(Paths(TarWriter().File("./a").File("/b").File("//c//d").File("././e/./f").Finish()),
            "/a file 0644 0:0 0 bytes \"\"\n"
            "/b file 0644 0:0 0 bytes \"\"\n"
            "/c directory 0755 0:0\n"
            "/c/d file 0644 0:0 0 bytes \"\"\n"
            "/e directory 0755 0:0\n"
            "/e/f file 0644 0:0 0 bytes \"\"\n");
}

TEST_F(ImportTarTest, DotDotNeverLeavesTheRoot) {
  EXPECT_EQ(Paths(TarWriter().File("../a").File("b/../../../c").File("d/e/../f").Finish()),
            "/a file 0644 0:0 0 bytes \"\"\n"
            "/c file 0644 0:0 0 bytes \"\"\n"
            "/d directory 0755 0:0\n"
            "/d/f file 0644 0:0 0 bytes \"\"\n");
}

TEST_F(ImportTarTest, TrailingSlashOfADirectoryDoesNotMatter) {
  EXPECT_EQ(Paths(TarWriter().Directory("d/").File("d/f").Finish()),
            "/d directory 0755 0:0\n/d/f file 0644 0:0 0 bytes \"\"\n");
}

TEST_F(ImportTarTest, RegularFileWithTrailingSlashIsADirectoryAsInV7Archives) {
  EXPECT_TRUE(
      At(Import(TarWriter().Add({.name = "d/", .type = '\0'}).Finish()), "d").is_directory());
  EXPECT_THAT(Error(TarWriter().File("d/", "content").Finish()),
              HasSubstr("has the name of a directory"));
}

TEST_F(ImportTarTest, MissingParentsAreMadeAndTakeTheirAttributesLater) {
  TarWriter tar;
  tar.File("a/b/c");
  tar.Add({.name = "a", .type = '5', .mode = 0700, .uid = 9, .mtime = 5});
  EXPECT_EQ(Describe(Import(tar.Finish()), sink_, {.root = false}),
            "/a directory 0700 9:0 5.000000000\n"
            "/a/b directory 0755 0:0 0.000000000\n"
            "/a/b/c file 0644 0:0 0.000000000 0 bytes \"\"\n");
}

TEST_F(ImportTarTest, DirectoriesWithoutAnEntryAreMarkedForTheMerge) {
  TarWriter tar;
  tar.File("implied/file");
  tar.Directory("named/").File("named/file");
  const auto is_marked = [](const Inode& inode) {
    return std::ranges::any_of(inode.xattrs,
                               [](const Xattr& xattr) { return xattr.name == kImpliedXattr; });
  };
  const Tree tree = Import(tar.Finish());
  EXPECT_TRUE(is_marked(tree.inode(Tree::kRoot)));
  EXPECT_TRUE(is_marked(At(tree, "implied")));
  EXPECT_FALSE(is_marked(At(tree, "named")));
  EXPECT_FALSE(is_marked(Import(TarWriter().Directory("./").Finish()).inode(Tree::kRoot)));
}

TEST_F(ImportTarTest, DirectoryInPlaceOfADeletedOneTakesNothingOfThatOne) {
  TarWriter tar;
  tar.File(".wh.d").File("d/new");
  const Tree tree = Import(tar.Finish());
  EXPECT_THAT(At(tree, "d").xattrs,
              testing::ElementsAre(testing::Field(&Xattr::name, "trusted.overlay.opaque")));
}

TEST_F(ImportTarTest, NamesAreBytesWhateverTheirEncoding) {
  const std::string name = "\xff\xfe-\xc3\xa9-e\xcc\x81";  // neither valid nor in normal form
  TarWriter tar;
  tar.File(name);
  tar.Symlink("link", name);
  tar.Pax({{"path", "long-" + name}}).File("short");
  tar.Pax({{"linkpath", name + "/x"}}).Symlink("link2", "short");
  const Tree tree = Import(tar.Finish());
  EXPECT_TRUE(Exists(tree, name));
  EXPECT_TRUE(Exists(tree, "long-" + name));
  EXPECT_EQ(At(tree, "link").target, name);
  EXPECT_EQ(At(tree, "link2").target, name + "/x");
}

TEST_F(ImportTarTest, NamesOf255BytesAreKeptAndLongerOnesRefused) {
  const std::string name(255, 'n');
  EXPECT_TRUE(Exists(Import(TarWriter().Pax({{"path", name}}).File("x").Finish()), name));
  EXPECT_THAT(Error(TarWriter().Pax({{"path", name + "n"}}).File("x").Finish()),
              HasSubstr("256 bytes"));
}

TEST_F(ImportTarTest, PathsThatNoKernelTakesAreRefused) {
  std::string path;
  while (path.size() < 4094) path += "d/";
  EXPECT_TRUE(
      Exists(Import(TarWriter().Pax({{"path", path + "f"}}).File("x").Finish()), path + "f"));
  EXPECT_THAT(Error(TarWriter().Pax({{"path", path + "/f"}}).File("x").Finish()),
              HasSubstr("path of 4096 bytes, at most 4095"));
}

TEST_F(ImportTarTest, DepthBeyondThePathLimitThroughSymlinksIsRefused) {
  std::string path;
  while (path.size() < 4000) path += "d/";
  TarWriter tar;
  tar.Pax({{"path", path}}).Directory("x");
  tar.Pax({{"linkpath", path}}).Symlink("deep", "x");
  tar.Pax({{"path", "deep/" + path + "f"}}).File("x");
  EXPECT_THAT(Error(tar.Finish()), HasSubstr("leads too deep"));
}

// Replacement: the later entry of a path counts.

TEST_F(ImportTarTest, LaterFileReplacesFile) {
  EXPECT_EQ(Paths(TarWriter().File("a", "old").File("./a", "new").Finish()),
            "/a file 0644 0:0 3 bytes \"new\"\n");
}

TEST_F(ImportTarTest, FileReplacesDirectoryAndAllBelow) {
  EXPECT_EQ(Paths(TarWriter().Directory("a").File("a/b").File("a", "x").Finish()),
            "/a file 0644 0:0 1 bytes \"x\"\n");
}

TEST_F(ImportTarTest, DirectoryReplacesFile) {
  EXPECT_EQ(Paths(TarWriter().File("a").Directory("a").File("a/b").Finish()),
            "/a directory 0755 0:0\n/a/b file 0644 0:0 0 bytes \"\"\n");
}

TEST_F(ImportTarTest, DirectoryReplacesSymlinkAndDoesNotFollowIt) {
  TarWriter tar;
  tar.Directory("real", 0711).Symlink("a", "real").Directory("a", 0700);
  EXPECT_EQ(Paths(tar.Finish()), "/a directory 0700 0:0\n/real directory 0711 0:0\n");
}

TEST_F(ImportTarTest, FileReplacesSymlinkAndDoesNotFollowIt) {
  TarWriter tar;
  tar.File("real", "r").Symlink("a", "real").File("a", "new");
  EXPECT_EQ(Paths(tar.Finish()),
            "/a file 0644 0:0 3 bytes \"new\"\n/real file 0644 0:0 1 bytes \"r\"\n");
}

TEST_F(ImportTarTest, DirectoryTwiceKeepsContentAndTakesNewAttributes) {
  TarWriter tar;
  tar.Pax({{"SCHILY.xattr.user.a", "1"}}).Directory("d", 0700);
  tar.File("d/f");
  tar.Pax({{"SCHILY.xattr.user.b", "2"}}).Directory("d", 0711);
  EXPECT_EQ(Paths(tar.Finish()),
            "/d directory 0711 0:0 user.a=1 user.b=2\n/d/f file 0644 0:0 0 bytes \"\"\n");
}

TEST_F(ImportTarTest, SymlinkDeviceAndFifoReplaceEachOther) {
  TarWriter tar;
  tar.Directory("a").Symlink("a", "t").Add({.name = "a", .type = '6'});
  tar.Add({.name = "a", .type = '3', .major = 1, .minor = 5}).Symlink("a", "u");
  EXPECT_EQ(Paths(tar.Finish()), "/a symlink 0777 0:0 -> u\n");
}

// Parents that are not directories.

TEST_F(ImportTarTest, ParentThatIsASymlinkOfThisArchiveIsFollowed) {
  TarWriter tar;
  tar.Directory("usr").Directory("usr/lib").Symlink("lib", "usr/lib").Symlink("abs", "/usr/lib");
  tar.File("lib/a").File("abs/b");
  const Tree tree = Import(tar.Finish());
  EXPECT_TRUE(Exists(tree, "usr/lib/a"));
  EXPECT_TRUE(Exists(tree, "usr/lib/b"));
  EXPECT_TRUE(At(tree, "lib").is_symlink());
}

TEST_F(ImportTarTest, ParentSymlinkCannotLeaveTheRoot) {
  TarWriter tar;
  tar.Directory("d").Symlink("d/up", "../../../../etc").Symlink("top", "/..");
  tar.File("d/up/passwd", "x").File("top/file");
  const Tree tree = Import(tar.Finish());
  EXPECT_TRUE(Exists(tree, "etc/passwd"));
  EXPECT_TRUE(Exists(tree, "file"));
}

TEST_F(ImportTarTest, ParentSymlinkToNothingMakesItsTarget) {
  EXPECT_TRUE(Exists(Import(TarWriter().Symlink("l", "x/y").File("l/f").Finish()), "x/y/f"));
}

TEST_F(ImportTarTest, ParentSymlinkLoopIsAnError) {
  EXPECT_THAT(Error(TarWriter().Symlink("a", "b").Symlink("b", "a").File("a/f").Finish()),
              AllOf(HasSubstr("\"a/f\""), HasSubstr("too many symbolic links")));
  EXPECT_THAT(Error(TarWriter().Symlink("a", "a/a").File("a/f").Finish()),
              HasSubstr("too many symbolic links"));
}

TEST_F(ImportTarTest, ParentThatIsAFileIsAnErrorThatNamesBoth) {
  EXPECT_THAT(Error(TarWriter().File("a").File("a/f").Finish()),
              AllOf(HasSubstr("\"a/f\""), HasSubstr("\"a\" on its path is not a directory")));
}

TEST_F(ImportTarTest, ReplacedParentIsLookedUpAnew) {
  TarWriter tar;
  tar.Directory("one").Directory("two").Symlink("p", "one").File("p/a");
  tar.Symlink("p", "two").File("p/b");
  const Tree tree = Import(tar.Finish());
  EXPECT_TRUE(Exists(tree, "one/a"));
  EXPECT_TRUE(Exists(tree, "two/b"));
}

// Hard links.

TEST_F(ImportTarTest, HardLinksAreOneInodeUnderSeveralNames) {
  TarWriter tar;
  tar.File("a", "data").Directory("d").HardLink("d/b", "a").HardLink("c", "./d/b");
  const Tree tree = Import(tar.Finish());
  EXPECT_EQ(Describe(tree, sink_, {.root = false, .mtime = false}),
            "/a file 0644 0:0 4 bytes \"data\"\n"
            "/c file 0644 0:0 4 bytes \"data\" linked to /a\n"
            "/d directory 0755 0:0\n"
            "/d/b file 0644 0:0 4 bytes \"data\" linked to /a\n");
  EXPECT_EQ(tree.link_count(*tree.Find(Tree::kRoot, "a")), 3U);
}

TEST_F(ImportTarTest, HardLinkToSymlinkLinksTheSymlink) {
  EXPECT_EQ(Paths(TarWriter().Symlink("s", "nowhere").HardLink("h", "s").Finish()),
            "/h symlink 0777 0:0 -> nowhere\n/s symlink 0777 0:0 -> nowhere linked to /h\n");
}

TEST_F(ImportTarTest, HardLinkToDeviceLinksTheDevice) {
  TarWriter tar;
  tar.Add({.name = "null", .type = '3', .major = 1, .minor = 3}).HardLink("zero", "null");
  EXPECT_EQ(Paths(tar.Finish()),
            "/null character 0644 0:0 1:3\n/zero character 0644 0:0 1:3 linked to /null\n");
}

TEST_F(ImportTarTest, HardLinkToMissingFileIsAnErrorThatNamesBoth) {
  EXPECT_THAT(Error(TarWriter().HardLink("a", "gone").Finish()),
              AllOf(HasSubstr("\"a\""), HasSubstr("hard link to \"gone\""),
                    HasSubstr("not in the archive before")));
  EXPECT_THAT(Error(TarWriter().HardLink("a", "no/such").Finish()),
              AllOf(HasSubstr("hard link to \"no/such\""), HasSubstr("no directory \"no\"")));
}

TEST_F(ImportTarTest, HardLinkToALaterFileIsAnError) {
  EXPECT_THAT(Error(TarWriter().HardLink("a", "b").File("b").Finish()), HasSubstr("\"b\""));
}

TEST_F(ImportTarTest, HardLinkToADirectoryIsAnError) {
  EXPECT_THAT(Error(TarWriter().Directory("d").HardLink("a", "d").Finish()),
              HasSubstr("hard link to \"d\": is a directory"));
  EXPECT_THAT(Error(TarWriter().HardLink("a", "/").Finish()), HasSubstr("hard link to \"/\""));
}

TEST_F(ImportTarTest, HardLinkTargetIsConfinedToTheRoot) {
  EXPECT_TRUE(Exists(Import(TarWriter().File("f").HardLink("a", "../../f").Finish()), "a"));
}

TEST_F(ImportTarTest, HardLinkTargetReplacedLaterLeavesTheLinkAsItWas) {
  EXPECT_EQ(Paths(TarWriter().File("a", "old").HardLink("b", "a").File("a", "new").Finish()),
            "/a file 0644 0:0 3 bytes \"new\"\n/b file 0644 0:0 3 bytes \"old\"\n");
}

TEST_F(ImportTarTest, HardLinkReplacesWhatHasItsName) {
  TarWriter tar;
  tar.File("a", "x").Directory("b").File("b/c").HardLink("b", "a");
  EXPECT_EQ(Paths(tar.Finish()),
            "/a file 0644 0:0 1 bytes \"x\"\n/b file 0644 0:0 1 bytes \"x\" linked to /a\n");
}

TEST_F(ImportTarTest, HardLinkToItselfOrTwiceChangesNothing) {
  TarWriter tar;
  tar.File("a", "x").HardLink("a", "a").HardLink("b", "a").HardLink("b", "a").HardLink("a", "b");
  EXPECT_EQ(Paths(tar.Finish()),
            "/a file 0644 0:0 1 bytes \"x\"\n/b file 0644 0:0 1 bytes \"x\" linked to /a\n");
}

TEST_F(ImportTarTest, HardLinkThatWouldRemoveItsTargetIsAnError) {
  EXPECT_THAT(Error(TarWriter().File("d/f").HardLink("d", "d/f").Finish()),
              HasSubstr("lies below the name that it replaces"));
}

TEST_F(ImportTarTest, HardLinkKeepsTheAttributesOfItsTarget) {
  TarWriter tar;
  tar.File("a", "x");
  tar.Add({.name = "b", .type = '1', .mode = 0777, .uid = 7, .link = "a"});
  EXPECT_EQ(At(Import(tar.Finish()), "b").mode, S_IFREG | 0644);
}

TEST_F(ImportTarTest, HardLinkWithSizeButNoContentIsRead) {
  TarWriter tar;
  tar.File("a", "abc");
  tar.Raw(TarHeaderBlock({.name = "b", .type = '1', .link = "a"}, 3));
  tar.File("c", "after");
  EXPECT_EQ(Paths(tar.Finish()),
            "/a file 0644 0:0 3 bytes \"abc\"\n"
            "/b file 0644 0:0 3 bytes \"abc\" linked to /a\n"
            "/c file 0644 0:0 5 bytes \"after\"\n");
}

TEST_F(ImportTarTest, HardLinkWithContentIsReadAndTheContentSkipped) {
  TarWriter tar;
  tar.File("a", "abc");
  tar.Add({.name = "b", .type = '1', .link = "a", .content = "abc"});
  tar.File("c", "after");
  EXPECT_EQ(Paths(tar.Finish()),
            "/a file 0644 0:0 3 bytes \"abc\"\n"
            "/b file 0644 0:0 3 bytes \"abc\" linked to /a\n"
            "/c file 0644 0:0 5 bytes \"after\"\n");
}

// Other limits.

TEST_F(ImportTarTest, SymlinkTargetsOutOfRangeAreRefused) {
  EXPECT_THAT(Error(TarWriter().Symlink("a", "").Finish()), HasSubstr("target of 0 bytes"));
  EXPECT_THAT(
      Error(TarWriter().Pax({{"linkpath", std::string(4096, 'x')}}).Symlink("a", "").Finish()),
      HasSubstr("target of 4096 bytes"));
}

TEST_F(ImportTarTest, DeviceNumbersOutOfRangeAreRefused) {
  EXPECT_THAT(Error(TarWriter().Add({.name = "a", .type = '3', .major = 4096}).Finish()),
              HasSubstr("device number 4096:0 is out of range"));
}

TEST_F(ImportTarTest, UnknownEntryTypeIsAnError) {
  EXPECT_THAT(Error(TarWriter().Add({.name = "a", .type = 'Q'}).Finish()),
              AllOf(HasSubstr("\"a\""), HasSubstr("unknown entry type 0x51")));
}

TEST_F(ImportTarTest, ErrorsShowUnprintableNamesEscaped) {
  EXPECT_THAT(Error(TarWriter().File("a").File("a/\x1b[31m").Finish()), HasSubstr("a/\\x1b[31m"));
}

TEST_F(ImportTarTest, FailureOfTheSinkIsPassedOnWithTheEntry) {
  class FullSink : public CountingSink {
   public:
    absl::Status Append(std::span<const std::byte>) override {
      return absl::ResourceExhaustedError("disk is full");
    }
  };
  FullSink sink;
  const absl::Status status = ImportBytes(TarWriter().File("a", "x").Finish(), sink).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "tar entry \"a\": disk is full");
}

TEST_F(ImportTarTest, FailureOfTheReadFunctionIsPassedOn) {
  const absl::StatusOr<Tree> tree = ImportTar(
      [](std::span<std::byte>) { return absl::UnavailableError("connection lost"); }, sink_);
  EXPECT_EQ(tree.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(tree.status().message()),
              AllOf(HasSubstr("byte 0"), HasSubstr("connection lost")));
}

}  // namespace
}  // namespace lamina::erofs
