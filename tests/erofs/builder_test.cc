// SPDX-License-Identifier: Apache-2.0
#include "erofs/builder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/sysmacros.h>

#include <cstring>

#include "erofs/chunk_map.h"
#include "erofs/format.h"
#include "tests/erofs/erofs_testing.h"

namespace lamina::erofs {
namespace {

using testing::HasSubstr;

const std::vector<Device> kDevices = {{.tag = "one", .blocks = 1u << 31},
                                      {.tag = "two", .blocks = 1000}};

Inode File(uint64_t size, std::vector<Extent> extents = {}) {
  Inode inode = {.mode = S_IFREG | 0644, .size = size};
  inode.extents = std::move(extents);
  return inode;
}

Tree TreeOf(Inode inode) {
  Tree tree;
  tree.Create(Tree::kRoot, "file", std::move(inode)).value();
  return tree;
}

std::string Build(const Tree& tree) { return BuildImage(tree, {.devices = kDevices}).value(); }

SuperBlock SuperOf(const std::string& image) {
  SuperBlock super;
  std::memcpy(&super, image.data() + kSuperOffset, sizeof(super));
  return super;
}

InodeInfo Lookup(const Reader& reader, std::string_view name) {
  const InodeInfo root = reader.ReadInode(reader.root()).value();
  return reader.ReadInode(reader.Lookup(root, name).value()).value();
}

TEST(BuilderTest, IsAFunctionOfItsArguments) {
  const Tree tree = RandomTree(7, 500, kDevices);
  const std::string image = Build(tree);
  EXPECT_EQ(image, Build(tree));
  EXPECT_EQ(image.size() % kBlockSize, 0u);
  // The order in which a tree was filled does not show.
  Tree forwards;
  Tree backwards;
  for (int i = 0; i < 50; ++i) {
    forwards.Create(Tree::kRoot, std::to_string(i), File(i)).value();
    backwards.Create(Tree::kRoot, std::to_string(49 - i), File(49 - i)).value();
  }
  EXPECT_EQ(Build(forwards), Build(backwards));
}

TEST(BuilderTest, WritesASuperBlockWithChecksumUuidAndDevices) {
  const std::array<uint8_t, 16> uuid = {1, 2, 3, 4};
  const std::string image = BuildImage(Tree(), {.devices = kDevices, .uuid = uuid}).value();
  const SuperBlock super = SuperOf(image);
  EXPECT_EQ(super.magic, kSuperMagic);
  EXPECT_EQ(super.uuid, uuid);
  EXPECT_EQ(super.inodes, 1u);
  EXPECT_EQ(super.extra_devices, 2u);
  EXPECT_EQ(uint64_t{super.blocks} * kBlockSize, image.size());
  const Reader reader = Reader::Open(AsBytes(image)).value();
  ASSERT_EQ(reader.devices().size(), 2u);
  EXPECT_EQ(reader.devices()[0].tag, "one");
  EXPECT_EQ(reader.devices()[1].blocks, 1000u);
  std::string damaged = image;
  damaged[kSuperOffset + offsetof(SuperBlock, uuid)] ^= 1;
  EXPECT_THAT(Reader::Open(AsBytes(damaged)).status().message(), HasSubstr("checksum"));
}

TEST(BuilderTest, HasRoomForEveryDevice) {
  const std::vector<Device> devices(65535, Device{.tag = std::string(64, 't'), .blocks = 1u << 31});
  const std::string image =
      BuildImage(TreeOf(File(5, {{0, 5, 65535, 9}})), {.devices = devices}).value();
  const Reader reader = Reader::Open(AsBytes(image)).value();
  EXPECT_EQ(reader.devices().size(), 65535u);
  EXPECT_EQ(reader.Map(Lookup(reader, "file"), 0)->device, 65535);
}

TEST(BuilderTest, SavesSpaceWithTheMostFrequentMtime) {
  Tree tree;
  Inode inode = File(0);
  inode.mtime = {1234, 56789};
  tree.Create(Tree::kRoot, "a", inode).value();
  tree.Create(Tree::kRoot, "b", inode).value();
  inode.mtime = {99, 0};
  tree.Create(Tree::kRoot, "c", inode).value();
  const std::string image = Build(tree);
  EXPECT_EQ(SuperOf(image).build_time, 1234);
  EXPECT_EQ(SuperOf(image).build_time_nsec, 56789u);
  const Reader reader = Reader::Open(AsBytes(image)).value();
  EXPECT_EQ(Lookup(reader, "a").inode_size, 32u);
  EXPECT_EQ(Lookup(reader, "c").inode_size, 64u);
  EXPECT_EQ(Lookup(reader, "c").mtime, (Timestamp{99, 0}));
}

TEST(BuilderTest, TakesTheEarliestOfEquallyFrequentMtimes) {
  for (const bool swapped : {false, true}) {
    Tree tree;
    tree.inode(Tree::kRoot).mtime = {swapped ? 20 : -5, 0};
    Inode inode = File(0);
    inode.mtime = {swapped ? -5 : 20, 0};
    tree.Create(Tree::kRoot, "a", inode).value();
    EXPECT_EQ(SuperOf(Build(tree)).build_time, -5);
  }
}

TEST(BuilderTest, StoresACommonXattrOnce) {
  const auto image_size = [](int files) {
    Tree tree;
    Inode inode = File(0);
    inode.xattrs = {{"security.selinux", std::string(20000, 's')}};
    for (int i = 0; i < files; ++i) tree.Create(Tree::kRoot, std::to_string(i), inode).value();
    return Build(tree).size();
  };
  EXPECT_LT(image_size(100), image_size(1) + 20000);
}

struct ChunkCase {
  std::string name;
  Inode file;
  int block_bits;
  uint32_t entries;
};

TEST(BuilderTest, ChoosesTheLargestChunksThatFit) {
  constexpr uint64_t kGiB = 1 << 30;
  const std::vector<ChunkCase> cases = {
      {"one byte", File(1, {{0, 1, 1, 0}}), 0, 1},
      {"two blocks", File(8192, {{0, 8192, 1, 0}}), 1, 1},
      {"contiguous", File(5 * kGiB + 1, {{0, 5 * kGiB + 1, 1, 77}}), 21, 1},
      {"contiguous in two extents", File(12288, {{0, 4096, 1, 8}, {4096, 8192, 1, 9}}), 2, 1},
      {"one block, then elsewhere", File(12288, {{0, 4096, 1, 8}, {4096, 8192, 1, 10}}), 0, 3},
      {"same block number, other device",
       File(1 << 20, {{0, 1 << 19, 1, 0}, {1 << 19, 1 << 19, 2, 128}}), 7, 2},
      {"hole first", File(1 << 20, {{1 << 19, 1 << 19, 1, 0}}), 7, 2},
      {"hole at the end", File(1 << 20, {{0, 1 << 18, 1, 0}}), 6, 4},
      {"all hole", File(1 << 20), 8, 1},
      {"all hole, as large as can be", File(INT64_MAX), 31, 1u << 20},
  };
  for (const ChunkCase& c : cases) {
    SCOPED_TRACE(c.name);
    const absl::StatusOr<ChunkPlan> plan = PlanChunks(c.file, kDevices);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->block_bits, c.block_bits);
    EXPECT_EQ(plan->entries, c.entries);
  }
}

TEST(BuilderTest, RefusesAnAbsurdlyScatteredFile) {
  // A single block amid a hole of 128 GiB.
  const Inode file = File(uint64_t{1} << 37, {{4096, 4096, 1, 0}});
  const absl::Status status = BuildImage(TreeOf(file), {.devices = kDevices}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(),
              HasSubstr("/file: 1 extents in 137438953472 bytes are too scattered"));
}

// Each of them is allowed, and takes next to nothing in a tar archive.
TEST(BuilderTest, RefusesManyScatteredFiles) {
  Tree tree;
  for (int i = 0; i < 5; ++i) {
    const Inode file = File(uint64_t{1} << 36, {{4096, 4096, 1, 0}});
    ASSERT_TRUE(tree.Create(Tree::kRoot, fmt::format("{}", i), file).ok());
  }
  const absl::Status status = BuildImage(tree, {.devices = kDevices}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("bytes of chunk indexes"));
}

struct BadCase {
  Inode inode;
  std::string message;
};

Inode WithXattr(std::string name, std::string value) {
  Inode inode = File(0);
  inode.xattrs = {{std::move(name), std::move(value)}};
  return inode;
}

TEST(BuilderTest, RefusesWhatErofsCannotCarryAndNamesIt) {
  const std::vector<BadCase> cases = {
      {File(5), ""},  // a hole is fine
      {{.mode = 0644}, "has no file type"},
      {{.mode = S_IFREG, .mtime = {0, 1'000'000'000}}, "nanoseconds"},
      {{.mode = S_IFLNK | 0777}, "target of 0 bytes"},
      {{.mode = S_IFLNK | 0777, .target = std::string(4096, 't')}, "target of 4096 bytes"},
      {{.mode = S_IFLNK | 0777, .target = std::string("a\0b", 3)}, "without NUL"},
      {{.mode = S_IFCHR, .rdev = makedev(4096, 0)}, "device number"},
      {{.mode = S_IFBLK, .rdev = makedev(0, 1 << 20)}, "device number"},
      {WithXattr("system.nfs4_acl", ""), "no place for this name"},
      {WithXattr("user.", "x"), "no place for this name"},
      {WithXattr("user.large", std::string(65536, 'v')), "value of 65536 bytes"},
      {File(uint64_t{1} << 63), "file size"},
      {File(4096, {{0, 4096, 0, 1}}), "there are devices 1 to 2"},
      {File(4096, {{0, 4096, 3, 1}}), "there are devices 1 to 2"},
      {File(4096, {{0, 4096, 2, 1000}}), "past the end of the device, 1000 blocks"},
      {File(8192, {{0, 8192, 2, 999}}), "past the end of the device"},
      {File(4096, {{0, 8192, 1, 0}}), "past the end of the file"},
      {File(8192, {{100, 4096, 1, 0}}), "not aligned"},
      {File(8192, {{0, 100, 1, 0}}), "not a whole number of blocks"},
      {File(8192, {{0, 8192, 1, 0}, {4096, 4096, 1, 5}}), "overlaps"},
      {File(8192, {{0, 0, 1, 0}}), "empty"},
  };
  for (const BadCase& c : cases) {
    SCOPED_TRACE(c.message);
    const absl::Status status = BuildImage(TreeOf(c.inode), {.devices = kDevices}).status();
    if (c.message.empty()) {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("/file: "));
    EXPECT_THAT(status.message(), HasSubstr(c.message));
  }
}

TEST(BuilderTest, RefusesALongDeviceTag) {
  EXPECT_THAT(BuildImage(Tree(), {.devices = {{.tag = std::string(65, 't')}}}).status().message(),
              HasSubstr("device tag of 65 bytes"));
}

TEST(BuilderTest, IgnoresUnlinkedInodes) {
  Tree tree = TreeOf(File(0));
  tree.Remove(Tree::kRoot, "file");
  EXPECT_EQ(SuperOf(Build(tree)).inodes, 1u);
}

TEST(BuilderTest, BuildsADeepTree) {
  Tree tree;
  InodeIndex directory = Tree::kRoot;
  for (int i = 0; i < 50'000; ++i) {
    directory = *tree.Create(directory, "d", {.mode = S_IFDIR | 0755});
  }
  const std::string image = Build(tree);
  const Reader reader = Reader::Open(AsBytes(image)).value();
  const absl::StatusOr<Tree> read = ReadTree(reader);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->inode_limit(), 50'001u);
}

TEST(BuilderTest, ReadsBackRandomTrees) {
  for (uint64_t seed = 100; seed < 160; ++seed) {
    SCOPED_TRACE(seed);
    const Tree tree = RandomTree(seed, 20 + seed * seed % 700, kDevices);
    const std::string image = Build(tree);
    const Reader reader = Reader::Open(AsBytes(image)).value();
    const absl::StatusOr<Tree> read = ReadTree(reader);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(Describe(*read), Describe(tree));
    EXPECT_EQ(DescribeImage(reader), Describe(tree));
    EXPECT_EQ(DescribeExtents(*read), DescribeExtents(tree));
    EXPECT_EQ(Build(*read), image);
  }
}

}  // namespace
}  // namespace lamina::erofs
