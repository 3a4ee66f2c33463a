// SPDX-License-Identifier: Apache-2.0
//
// Whiteouts of the OCI image specification (layer.md, "Whiteouts") in archives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "erofs/import.h"
#include "tests/erofs/import_testing.h"

namespace lamina::erofs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kOpaque[] = "trusted.overlay.opaque";

Tree Import(const std::string& archive) {
  RecordingSink sink;
  absl::StatusOr<Tree> tree = ImportBytes(archive, sink);
  EXPECT_TRUE(tree.ok()) << tree.status();
  return tree.ok() ? *std::move(tree) : Tree();
}

std::string Error(const std::string& archive) {
  RecordingSink sink;
  absl::StatusOr<Tree> tree = ImportBytes(archive, sink);
  EXPECT_FALSE(tree.ok());
  return tree.ok() ? "" : std::string(tree.status().message());
}

std::string Lines(const std::string& archive) {
  RecordingSink sink;
  absl::StatusOr<Tree> tree = ImportBytes(archive, sink);
  EXPECT_TRUE(tree.ok()) << tree.status();
  return tree.ok() ? Describe(*tree, sink, {.root = false, .mtime = false}) : "";
}

TEST(ImportTarWhiteoutTest, WhiteoutBecomesACharacterDevice) {
  const Tree tree = Import(TarWriter().Directory("d").File("d/.wh.gone").File(".wh.top").Finish());
  EXPECT_TRUE(At(tree, "d/gone").is_whiteout());
  EXPECT_TRUE(At(tree, "top").is_whiteout());
  EXPECT_FALSE(Exists(tree, "d/.wh.gone"));
}

TEST(ImportTarWhiteoutTest, WhiteoutsDependOnTheirNameAlone) {
  const std::string plain = Lines(TarWriter().File(".wh.a").Finish());
  EXPECT_EQ(plain, "/a character 0000 0:0 0:0\n");
  EXPECT_EQ(Lines(TarWriter()
                      .Add({.name = "./.wh.a", .mode = 0755, .uid = 4, .mtime = 9, .content = "x"})
                      .Finish()),
            plain);
}

TEST(ImportTarWhiteoutTest, WhiteoutMakesMissingParents) {
  EXPECT_TRUE(At(Import(TarWriter().File("a/b/.wh.c").Finish()), "a/b/c").is_whiteout());
}

TEST(ImportTarWhiteoutTest, WhiteoutsBelowWhatReplacedTheirDirectoryHaveNoEffect) {
  for (const bool before : {false, true}) {
    for (const bool link : {false, true}) {
      TarWriter tar;
      if (before) tar.File("e/.wh.old").File("e/f/.wh..wh..opq");
      if (link) {
        tar.Symlink("e", "elsewhere");
      } else {
        tar.File("e", "content");
      }
      if (!before) tar.File("e/.wh.old").File("e/f/.wh..wh..opq");
      const Tree tree = Import(tar.Finish());
      EXPECT_EQ(At(tree, "e").is_symlink(), link);
      EXPECT_EQ(tree.entry_count(Tree::kRoot), 1U);
    }
  }
}

TEST(ImportTarWhiteoutTest, WhiteoutTwiceIsOne) {
  EXPECT_TRUE(At(Import(TarWriter().File(".wh.c").File(".wh.c").Finish()), "c").is_whiteout());
}

TEST(ImportTarWhiteoutTest, OpaqueMarkerSetsTheXattrOfItsDirectory) {
  const Tree tree = Import(TarWriter().Directory("d").File("d/.wh..wh..opq").Finish());
  EXPECT_EQ(XattrOf(At(tree, "d"), kOpaque), "y");
  EXPECT_EQ(tree.entry_count(*tree.Find(Tree::kRoot, "d")), 0U);
}

TEST(ImportTarWhiteoutTest, OpaqueMarkerBeforeItsDirectoryOrWithoutOneCounts) {
  EXPECT_EQ(Lines(TarWriter().File("d/.wh..wh..opq").Directory("d", 0700).Finish()),
            "/d directory 0700 0:0 trusted.overlay.opaque=y\n");
  EXPECT_EQ(Lines(TarWriter().File("d/.wh..wh..opq").Finish()),
            "/d directory 0755 0:0 trusted.overlay.opaque=y\n");
}

TEST(ImportTarWhiteoutTest, OpaqueMarkerKeepsContentOfTheSameLayer) {
  const std::string expected =
      "/d directory 0755 0:0 trusted.overlay.opaque=y\n/d/new file 0644 0:0 1 bytes \"n\"\n";
  EXPECT_EQ(Lines(TarWriter().Directory("d").File("d/.wh..wh..opq").File("d/new", "n").Finish()),
            expected);
  EXPECT_EQ(Lines(TarWriter().Directory("d").File("d/new", "n").File("d/.wh..wh..opq").Finish()),
            expected);
}

TEST(ImportTarWhiteoutTest, OpaqueMarkerAtTheRootMarksTheRoot) {
  EXPECT_EQ(XattrOf(Import(TarWriter().File(".wh..wh..opq").Finish()).inode(Tree::kRoot), kOpaque),
            "y");
}

TEST(ImportTarWhiteoutTest, OpaqueMarkerInADirectoryReplacedLaterIsForgotten) {
  TarWriter tar;
  tar.File("d/.wh..wh..opq").File("d/.wh.x").File("d", "file").Directory("d");
  EXPECT_EQ(Lines(tar.Finish()), "/d directory 0755 0:0\n");
}

TEST(ImportTarWhiteoutTest, FileOfTheSameLayerWinsInEitherOrder) {
  EXPECT_EQ(Lines(TarWriter().File(".wh.a").File("a", "new").Finish()),
            "/a file 0644 0:0 3 bytes \"new\"\n");
  EXPECT_EQ(Lines(TarWriter().File("a", "new").File(".wh.a").Finish()),
            "/a file 0644 0:0 3 bytes \"new\"\n");
}

TEST(ImportTarWhiteoutTest, DirectoryOfTheSameLayerWinsAndBecomesOpaque) {
  const std::string expected =
      "/a directory 0755 0:0 trusted.overlay.opaque=y\n/a/f file 0644 0:0 0 bytes \"\"\n";
  EXPECT_EQ(Lines(TarWriter().File(".wh.a").Directory("a").File("a/f").Finish()), expected);
  EXPECT_EQ(Lines(TarWriter().Directory("a").File("a/f").File(".wh.a").Finish()), expected);
  EXPECT_EQ(Lines(TarWriter().File(".wh.a").File("a/f").Finish()), expected);
}

TEST(ImportTarWhiteoutTest, HardLinkToAWhiteoutNameIsAnError) {
  EXPECT_THAT(Error(TarWriter().File(".wh.a").HardLink("b", "a").Finish()),
              AllOf(HasSubstr("\"b\""), HasSubstr("hard link to \"a\"")));
}

TEST(ImportTarWhiteoutTest, AufsMetadataIsIgnored) {
  TarWriter tar;
  tar.File(".wh..wh.aufs").Directory(".wh..wh.plnk").File(".wh..wh.plnk/1.2", "x");
  tar.Directory(".wh..wh.orph").File("kept");
  EXPECT_EQ(Lines(tar.Finish()), "/kept file 0644 0:0 0 bytes \"\"\n");
}

TEST(ImportTarWhiteoutTest, LinksToWhatAufsKeepsAsideAreFiles) {
  TarWriter tar;
  tar.Directory(".wh..wh.plnk").File(".wh..wh.plnk/1.2", "x").File(".wh..wh.plnk/3.4", "y");
  tar.HardLink("a", ".wh..wh.plnk/1.2").HardLink("b", ".wh..wh.plnk/1.2");
  EXPECT_EQ(Lines(tar.Finish()),
            "/a file 0644 0:0 1 bytes \"x\"\n/b file 0644 0:0 1 bytes \"x\" linked to /a\n");
}

TEST(ImportTarWhiteoutTest, WhiteoutOfNoNameIsAnError) {
  for (const char* name : {".wh.", "d/.wh.", ".wh..", ".wh..."}) {
    EXPECT_THAT(Error(TarWriter().File(name).Finish()),
                AllOf(HasSubstr(name), HasSubstr("whiteout of no name")));
  }
}

TEST(ImportTarWhiteoutTest, WhiteoutAsADirectoryIsAnError) {
  EXPECT_THAT(Error(TarWriter().File(".wh.d/file").Finish()),
              HasSubstr("a whiteout cannot be a directory"));
}

TEST(ImportTarWhiteoutTest, WhiteoutOfAnOverlongNameIsAnError) {
  const std::string name(256, 'n');
  EXPECT_THAT(Error(TarWriter().Pax({{"path", ".wh." + name}}).File("x").Finish()),
              HasSubstr("256 bytes"));
}

TEST(ImportTarWhiteoutTest, NameThatOnlyContainsThePrefixIsOrdinary) {
  EXPECT_TRUE(Exists(Import(TarWriter().File("a.wh.b").Finish()), "a.wh.b"));
  EXPECT_TRUE(Exists(Import(TarWriter().File(".whb").Finish()), ".whb"));
}

// On a node a character device 0:0 in an upper or lower directory is a whiteout, however it came
// there. It is taken as what it will be.
TEST(ImportTarWhiteoutTest, CharacterDeviceZeroIsAWhiteout) {
  const Tree tree = Import(TarWriter().Add({.name = "dev0", .type = '3'}).Finish());
  EXPECT_TRUE(At(tree, "dev0").is_whiteout());
}

}  // namespace
}  // namespace lamina::erofs
