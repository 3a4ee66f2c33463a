// SPDX-License-Identifier: Apache-2.0
#include "erofs/reader.h"

#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cstring>

#include "erofs/format.h"
#include "tests/erofs/erofs_testing.h"

namespace lamina::erofs {
namespace {

using testing::HasSubstr;

const std::vector<Device> kDevices = {{.tag = "one", .blocks = 1000},
                                      {.tag = "two", .blocks = 1000}};

Reader Open(const std::string& image) { return Reader::Open(AsBytes(image)).value(); }

InodeInfo Root(const Reader& reader) { return reader.ReadInode(reader.root()).value(); }

InodeInfo Find(const Reader& reader, std::string_view name) {
  return reader.ReadInode(reader.Lookup(Root(reader), name).value()).value();
}

// A tree with one inode of each kind.
std::string SmallImage() {
  Tree tree;
  Inode file = {.mode = S_IFREG | 0644, .size = 20'000};
  file.extents = {{0, 8192, 1, 10}, {16384, 20'000 - 16384, 2, 5}};
  file.xattrs = {{"security.selinux", "label"}, {"user.own", "value"}};
  const InodeIndex index = *tree.Create(Tree::kRoot, "file", file);
  EXPECT_TRUE(tree.Link(Tree::kRoot, "hard", index).ok());
  const InodeIndex directory = *tree.Create(Tree::kRoot, "sub", {.mode = S_IFDIR | 0755});
  for (int i = 0; i < 300; ++i) {
    EXPECT_TRUE(
        tree.Create(directory, fmt::format("entry {:03}", i), {.mode = S_IFIFO | 0600}).ok());
  }
  Inode link = {.mode = S_IFLNK | 0777, .target = "sub/entry"};
  link.xattrs = {{"security.selinux", "label"}};
  EXPECT_TRUE(tree.Create(Tree::kRoot, "link", link).ok());
  EXPECT_TRUE(tree.Create(Tree::kRoot, "null", {.mode = S_IFCHR, .rdev = makedev(1, 3)}).ok());
  return BuildImage(tree, {.devices = kDevices}).value();
}

// Changes a structure on disk, and sets the checksum right.
template <typename T, typename Change>
std::string Patch(std::string image, uint64_t offset, Change change) {
  T object;
  std::memcpy(&object, image.data() + offset, sizeof(object));
  change(object);
  std::memcpy(image.data() + offset, &object, sizeof(object));
  SuperBlock super;
  std::memcpy(&super, image.data() + kSuperOffset, sizeof(super));
  super.checksum =
      SuperBlockChecksum(AsBytes(image).subspan(kSuperOffset, SuperBlockChecksumSize(kBlockSize)));
  std::memcpy(image.data() + kSuperOffset, &super, sizeof(super));
  return image;
}

template <typename Change>
std::string PatchSuper(Change change) {
  return Patch<SuperBlock>(SmallImage(), kSuperOffset, change);
}

// Where a directory's entry lies in the image.
uint64_t DirentOffset(const std::string& image, std::string_view name) {
  const Reader reader = Open(image);
  const InodeInfo root = Root(reader);
  uint64_t position = 0;
  EXPECT_TRUE(reader
                  .ReadDirectory(root, 0,
                                 [&](const Reader::Entry& entry) {
                                   position = entry.position;
                                   return entry.name != name;
                                 })
                  .ok());
  return reader.Map(root, position)->offset;
}

absl::Status OpenStatus(const std::string& image) { return Reader::Open(AsBytes(image)).status(); }

absl::Status TreeStatus(const std::string& image) {
  const absl::StatusOr<Reader> reader = Reader::Open(AsBytes(image));
  return reader.ok() ? ReadTree(*reader).status() : reader.status();
}

TEST(ReaderTest, FindsNamesAndSaysWhatIsNotThere) {
  const std::string image = SmallImage();
  const Reader reader = Open(image);
  EXPECT_EQ(Find(reader, "file").nid, Find(reader, "hard").nid);
  EXPECT_EQ(Find(reader, "file").links, 2u);
  EXPECT_EQ(Find(reader, "null").rdev, makedev(1, 3));
  EXPECT_EQ(*reader.Lookup(Root(reader), ".."), reader.root());
  const InodeInfo directory = Find(reader, "sub");
  EXPECT_TRUE(reader.Lookup(directory, "entry 000").ok());
  EXPECT_TRUE(reader.Lookup(directory, "entry 299").ok());
  for (const char* name : {"", "entry", "entry 300", "\xff", "entry 000 "}) {
    EXPECT_EQ(reader.Lookup(directory, name).status().code(), absl::StatusCode::kNotFound) << name;
  }
  EXPECT_EQ(reader.Lookup(Find(reader, "file"), "x").status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ReaderTest, ContinuesADirectoryFromAnyEntry) {
  const std::string image = SmallImage();
  const Reader reader = Open(image);
  const InodeInfo directory = Find(reader, "sub");
  std::vector<std::pair<std::string, uint64_t>> entries;
  ASSERT_TRUE(reader
                  .ReadDirectory(directory, 0,
                                 [&](const Reader::Entry& entry) {
                                   entries.emplace_back(entry.name, entry.next);
                                   return true;
                                 })
                  .ok());
  ASSERT_EQ(entries.size(), 302u);
  EXPECT_GT(directory.size, kBlockSize);
  for (size_t i = 0; i + 1 < entries.size(); ++i) {
    std::string next;
    ASSERT_TRUE(reader
                    .ReadDirectory(directory, entries[i].second,
                                   [&](const Reader::Entry& entry) {
                                     next = entry.name;
                                     return false;
                                   })
                    .ok());
    EXPECT_EQ(next, entries[i + 1].first);
  }
  bool more = false;
  ASSERT_TRUE(reader
                  .ReadDirectory(directory, entries.back().second,
                                 [&](const Reader::Entry&) { return more = true; })
                  .ok());
  EXPECT_FALSE(more);
}

TEST(ReaderTest, TellsTypesOfEntries) {
  const std::string image = SmallImage();
  const Reader reader = Open(image);
  std::string types;
  ASSERT_TRUE(reader
                  .ReadDirectory(Root(reader), 0,
                                 [&](const Reader::Entry& entry) {
                                   types += fmt::format("{}={} ", entry.name, entry.type);
                                   return true;
                                 })
                  .ok());
  EXPECT_EQ(types, fmt::format(".={0} ..={0} file={1} hard={1} link={2} null={3} sub={0} ", DT_DIR,
                               DT_REG, DT_LNK, DT_CHR));
}

TEST(ReaderTest, MapsDataAndHoles) {
  const std::string image = SmallImage();
  const Reader reader = Open(image);
  const InodeInfo file = Find(reader, "file");
  Mapped mapped = *reader.Map(file, 5000);
  EXPECT_EQ(mapped.kind, Mapped::Kind::kDevice);
  EXPECT_EQ(mapped.device, 1);
  EXPECT_EQ(mapped.offset, 10 * kBlockSize + 5000u);
  EXPECT_EQ(mapped.length, 8192u - 5000u);
  mapped = *reader.Map(file, 8192);
  EXPECT_EQ(mapped.kind, Mapped::Kind::kHole);
  EXPECT_EQ(mapped.length, 8192u);
  mapped = *reader.Map(file, 19'999);
  EXPECT_EQ(mapped.device, 2);
  EXPECT_EQ(mapped.offset, 5 * kBlockSize + (19'999u - 16384u));
  EXPECT_EQ(mapped.length, 1u);
  EXPECT_EQ(reader.Map(file, 20'000).status().code(), absl::StatusCode::kOutOfRange);
}

TEST(ReaderTest, GivesXattrsByName) {
  const std::string image = SmallImage();
  const Reader reader = Open(image);
  const InodeInfo file = Find(reader, "file");
  EXPECT_EQ(*reader.GetXattr(file, "user.own"), "value");
  EXPECT_EQ(*reader.GetXattr(file, "security.selinux"), "label");
  EXPECT_EQ(*reader.GetXattr(file, "user.other"), std::nullopt);
  EXPECT_EQ(*reader.GetXattr(file, ""), std::nullopt);
  EXPECT_EQ(*reader.GetXattr(Find(reader, "null"), "user.own"), std::nullopt);
}

TEST(ReaderTest, NamesTheFeaturesItDoesNotKnow) {
  const auto status = [](uint32_t feature) {
    return OpenStatus(PatchSuper([&](SuperBlock& super) { super.feature_incompat |= feature; }));
  };
  EXPECT_EQ(status(kFeature48Bit).code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status(kFeature48Bit).message(), HasSubstr("48-bit layout"));
  EXPECT_THAT(status(kFeatureMetabox).message(), HasSubstr("metabox"));
  EXPECT_THAT(status(0x40000000).message(), HasSubstr("0x40000000"));
}

TEST(ReaderTest, RefusesABadSuperBlock) {
  const auto status = [](auto change) { return OpenStatus(PatchSuper(change)); };
  EXPECT_THAT(status([](SuperBlock& s) { s.magic = 1; }).message(), HasSubstr("not EROFS"));
  EXPECT_THAT(status([](SuperBlock& s) { s.block_bits = 8; }).message(), HasSubstr("2^8"));
  EXPECT_THAT(status([](SuperBlock& s) { s.block_bits = 17; }).message(), HasSubstr("2^17"));
  EXPECT_THAT(status([](SuperBlock& s) { s.device_slot_offset = 0xFFFF; }).message(),
              HasSubstr("device table: device 1"));
  EXPECT_THAT(status([](SuperBlock& s) { s.build_time_nsec = 1'000'000'000; }).message(),
              HasSubstr("build time"));
  EXPECT_THAT(status([](SuperBlock& s) { s.meta_block = 0xFFFFFFFF; }).message(),
              HasSubstr("EROFS root"));
  EXPECT_THAT(status([](SuperBlock& s) { s.root_nid += 2; }).message(), HasSubstr("root"));
  EXPECT_FALSE(OpenStatus("").ok());
  EXPECT_FALSE(OpenStatus(std::string(4096, '\0')).ok());
}

TEST(ReaderTest, RefusesBadDirectories) {
  const std::string image = SmallImage();
  const auto with_dirent = [&](std::string_view name, auto change) {
    return TreeStatus(Patch<Dirent>(image, DirentOffset(image, name), change));
  };
  const uint32_t root = static_cast<uint32_t>(Open(image).root());
  EXPECT_THAT(with_dirent(".", [](Dirent& d) { d.name_offset = 0; }).message(),
              HasSubstr("names at 0"));
  EXPECT_THAT(with_dirent(".", [](Dirent& d) { d.name_offset += 1; }).message(),
              HasSubstr("names at"));
  EXPECT_THAT(with_dirent("hard", [](Dirent& d) { d.name_offset = 0xFFFF; }).message(),
              HasSubstr("name from"));
  EXPECT_THAT(with_dirent("file", [](Dirent& d) { d.type = 2; }).message(),
              HasSubstr("/file: entry of type"));
  EXPECT_THAT(with_dirent("file", [](Dirent& d) { d.nid_high = 7; }).message(),
              HasSubstr("outside the image"));
  EXPECT_THAT(with_dirent("..", [](Dirent& d) { d.nid_low += 1; }).message(),
              HasSubstr("/..: leads to inode"));
  EXPECT_THAT(with_dirent("sub", [&](Dirent& d) { d.nid_low = root; }).message(),
              HasSubstr("in two places"));
}

TEST(ReaderTest, RefusesUnsortedNames) {
  std::string image = SmallImage();
  const size_t name = image.find("hardlinknull");
  ASSERT_NE(name, image.npos);
  image[name] = 'z';
  EXPECT_THAT(TreeStatus(image).message(), HasSubstr("\"link\" after \"zard\""));
  image[name] = '/';
  EXPECT_THAT(TreeStatus(image).message(), HasSubstr("not a file name"));
}

TEST(ReaderTest, RefusesBadInodes) {
  const std::string image = SmallImage();
  const Reader reader = Open(image);
  const auto with_inode = [&](std::string_view name, auto change) {
    return TreeStatus(Patch<CompactInode>(image, Find(reader, name).header_offset, change));
  };
  EXPECT_THAT(with_inode("file", [](CompactInode& i) { i.mode = 0; }).message(),
              HasSubstr("no file type"));
  EXPECT_THAT(with_inode("file", [](CompactInode& i) { i.format |= 0x8000; }).message(),
              HasSubstr("format"));
  EXPECT_THAT(with_inode("file", [](CompactInode& i) { i.format |= 7 << 1; }).message(),
              HasSubstr("data layout 7"));
  EXPECT_THAT(with_inode("file", [](CompactInode& i) { i.location |= 0x80; }).message(),
              HasSubstr("chunk format"));
  EXPECT_THAT(with_inode("file", [](CompactInode& i) { i.size = 0xFFFFFFFF; }).message(),
              HasSubstr("overlap or leave the image"));
  EXPECT_THAT(with_inode("file", [](CompactInode& i) { i.xattr_count = 0xFFFF; }).message(),
              HasSubstr("/file: inode"));
  EXPECT_THAT(with_inode("link", [](CompactInode& i) { i.size = 0; }).message(),
              HasSubstr("target of 0 bytes"));
  EXPECT_THAT(with_inode("link", [](CompactInode& i) { i.size = 5000; }).message(),
              HasSubstr("target of 5000 bytes"));
  EXPECT_THAT(with_inode("sub", [](CompactInode& i) { i.location = 0x7FFFFFFF; }).message(),
              HasSubstr("of device 0"));
  EXPECT_THAT(with_inode("sub", [](CompactInode& i) { i.size = 0x7FFFFFFF; }).message(),
              HasSubstr("overlap or leave the image"));
}

TEST(ReaderTest, RefusesContentOutsideItsDevice) {
  const std::string image = SmallImage();
  const Reader reader = Open(image);
  const InodeInfo file = Find(reader, "file");
  const uint64_t index =
      AlignUp(file.header_offset + file.inode_size + file.xattr_size, sizeof(ChunkIndex));
  EXPECT_THAT(
      TreeStatus(Patch<ChunkIndex>(image, index, [](ChunkIndex& i) { i.block = 999; })).message(),
      HasSubstr("of device 1, which has 4096000"));
  EXPECT_THAT(
      TreeStatus(Patch<ChunkIndex>(image, index, [](ChunkIndex& i) { i.device = 3; })).message(),
      HasSubstr("content on device 3 of 2"));
}

TEST(ReaderTest, RefusesAHugeChunkIndexBeforeItIsRead) {
  Tree tree;
  Inode file = {.mode = S_IFREG | 0644, .uid = 100'000, .size = 8192};  // an extended inode
  file.extents = {{0, 8192, 1, 10}};
  ASSERT_TRUE(tree.Create(Tree::kRoot, "file", file).ok());
  const std::string image = BuildImage(tree, {.devices = kDevices}).value();
  const absl::Status status = TreeStatus(Patch<ExtendedInode>(
      image, Find(Open(image), "file").header_offset, [](ExtendedInode& inode) {
        inode.size = uint64_t{1} << 41;
        inode.location = kChunkIndexes;  // chunks of one block
      }));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("chunk index of 536870912 entries"));
}

// Directories that lead to the same blocks would multiply what they hold.
TEST(ReaderTest, RefusesDirectoriesThatShareTheirBlocks) {
  Tree tree;
  for (int d = 0; d < 2; ++d) {
    const InodeIndex directory =
        *tree.Create(Tree::kRoot, fmt::format("d{}", d), {.mode = S_IFDIR | 0755});
    for (int i = 0; i < 3000; ++i) {
      ASSERT_TRUE(tree.Create(directory, fmt::format("{}", i), {.mode = S_IFIFO}).ok());
    }
  }
  std::string image = BuildImage(tree, {}).value();
  const Reader reader = Open(image);
  const InodeInfo first = Find(reader, "d0");
  image = Patch<CompactInode>(image, Find(reader, "d1").header_offset, [&](CompactInode& inode) {
    inode.location = first.raw_union;
    inode.size = static_cast<uint32_t>(image.size() - first.size);
  });
  EXPECT_FALSE(TreeStatus(image).ok());
}

TEST(ReaderTest, RefusesManyCopiesOfOneXattr) {
  Tree tree;
  Inode inode = {.mode = S_IFREG | 0644};
  for (int i = 0; i < 4; ++i) {
    inode.xattrs.push_back({fmt::format("user.{}", i), std::string(60'000, 'x')});
  }
  for (int i = 0; i < 100; ++i)
    ASSERT_TRUE(tree.Create(Tree::kRoot, std::to_string(i), inode).ok());
  const absl::Status status = TreeStatus(BuildImage(tree, {}).value());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
}

TEST(ReaderTest, SurvivesTruncationAnywhere) {
  const std::string image = SmallImage();
  const std::string expected = Describe(*ReadTree(Open(image)));
  for (size_t size = 0; size < image.size(); size += size < 4096 ? 64 : 16) {
    const std::string cut = image.substr(0, size);
    const absl::StatusOr<Reader> reader = Reader::Open(AsBytes(cut));
    if (!reader.ok()) continue;
    const absl::StatusOr<Tree> tree = ReadTree(*reader);
    // Only padding may be missing from what reads as a whole.
    if (tree.ok()) {
      EXPECT_EQ(Describe(*tree), expected) << size;
    }
  }
}

TEST(ReaderTest, SurvivesDamageAnywhere) {
  std::string image = PatchSuper([](SuperBlock& super) { super.feature_compat = 0; });
  size_t refused = 0;
  for (size_t at = kSuperOffset; at < image.size(); at += 3) {
    for (const char damage : {'\x01', '\xff'}) {
      const char good = std::exchange(image[at], static_cast<char>(image[at] ^ damage));
      refused += !TreeStatus(image).ok();
      image[at] = good;
    }
  }
  EXPECT_GT(refused, 500u);
  EXPECT_TRUE(TreeStatus(image).ok());
}

// Small images that mkfs.erofs 1.9.3 made of one directory: block sizes and xattr prefixes that
// Debian's version does not know.
class ForeignImageTest : public testing::TestWithParam<const char*> {};

TEST_P(ForeignImageTest, ReadsTheSameTree) {
  const std::string image = *ReadFileToString(
      fmt::format("{}/fuzz/corpus/erofs_reader/{}", LAMINA_TESTS, GetParam()), 1 << 20);
  const Reader reader = Open(image);
  EXPECT_EQ(DescribeImage(reader),
            *ReadFileToString(LAMINA_TESTS "/erofs/foreign_images.txt", 1 << 20));
  const InodeInfo file = Find(reader, "file");
  std::string content;
  while (content.size() < file.size) {
    const Mapped mapped = reader.Map(file, content.size()).value();
    ASSERT_EQ(mapped.kind, Mapped::Kind::kDevice);
    content += AsText(reader.ImageBytes(mapped.offset, mapped.length).value());
  }
  std::string expected;
  for (int i = 1; i <= 500; ++i) expected += fmt::format("{}\n", i);
  EXPECT_EQ(content, expected);
}

INSTANTIATE_TEST_SUITE_P(ReaderTest, ForeignImageTest,
                         testing::Values("mkfs-512", "mkfs-1024-chunks", "mkfs-16384",
                                         "mkfs-xattr-prefixes"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace lamina::erofs
