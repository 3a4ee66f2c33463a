// SPDX-License-Identifier: Apache-2.0
//
// Images that we build, as the kernel and erofs-utils see them.
#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "tests/erofs/erofs_testing.h"

namespace lamina::erofs {
namespace {

constexpr uint32_t kDeviceBlocks = 1024;

Inode File(uint64_t size, std::vector<Extent> extents = {}) {
  Inode inode = {.mode = S_IFREG | 0644, .size = size};
  inode.extents = std::move(extents);
  return inode;
}

Inode Contiguous(uint64_t size, uint32_t block = 0) {
  return File(size, {{.offset = 0, .length = size, .device = 1, .block = block}});
}

// Builds images with two data devices and mounts them.
class KernelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!CanMount()) GTEST_SKIP() << "mounting needs root";
    for (uint16_t i = 0; i < devices_.size(); ++i) {
      device_paths_.push_back(scratch_.path() + "/device" + std::to_string(i + 1));
      ASSERT_TRUE(WriteDeviceFile(device_paths_[i], i + 1, devices_[i].blocks).ok());
    }
    image_path_ = scratch_.path() + "/image";
    mount_point_ = scratch_.path() + "/mnt";
    ASSERT_EQ(mkdir(mount_point_.c_str(), 0755), 0);
  }

  // Builds, checks with fsck.erofs and mounts. fsck.erofs reads all content with "--extract".
  void Mount(const Tree& tree, std::string_view fsck_option = "") {
    absl::StatusOr<std::string> image = BuildImage(tree, {.devices = devices_, .uuid = {1, 2, 3}});
    ASSERT_TRUE(image.ok()) << image.status();
    ASSERT_TRUE(WriteFile(image_path_, *image).ok());
    std::string arguments = image_path_;
    for (const std::string& device : device_paths_) arguments += " --device=" + device;
    const CommandResult fsck = RunCommand(fmt::format("fsck.erofs {} {}", fsck_option, arguments));
    EXPECT_TRUE(fsck.ok) << fsck.output;
    const CommandResult dump = RunCommand("dump.erofs -s -S " + arguments);
    EXPECT_TRUE(dump.ok) << dump.output;
    absl::StatusOr<KernelMount> mount =
        KernelMount::Create(image_path_, device_paths_, mount_point_);
    ASSERT_TRUE(mount.ok()) << mount.status();
    mount_ = std::make_unique<KernelMount>(*std::move(mount));
  }

  // Compares all of a file's content, byte by byte.
  void CheckContent(const std::string& path, const Inode& inode) {
    const absl::StatusOr<UniqueFd> file = OpenFile(path, O_RDONLY);
    ASSERT_TRUE(file.ok()) << file.status();
    std::string expected(inode.size, '\0');
    for (const Extent& extent : inode.extents) {
      for (uint64_t at = 0; at < extent.length; at += kBlockSize) {
        const std::string block =
            BlockContent(extent.device, extent.block + at / kBlockSize)
                .substr(0, std::min<uint64_t>(kBlockSize, extent.length - at));
        expected.replace(extent.offset + at, block.size(), block);
      }
    }
    std::string content(inode.size, '\0');
    ASSERT_TRUE(ReadFull(file->get(), 0, std::as_writable_bytes(std::span(content))).ok()) << path;
    EXPECT_TRUE(content == expected) << path;
  }

  void CheckAllContent(const Tree& tree) {
    std::vector<std::pair<std::string, InodeIndex>> pending = {{mount_->path(), Tree::kRoot}};
    for (size_t i = 0; i < pending.size(); ++i) {
      const auto [path, directory] = pending[i];
      for (const DirectoryEntry& entry : tree.Entries(directory)) {
        const std::string child = fmt::format("{}/{}", path, entry.name);
        const Inode& inode = tree.inode(entry.inode);
        if (inode.is_directory()) pending.emplace_back(child, entry.inode);
        if (inode.is_regular()) CheckContent(child, inode);
      }
    }
  }

  TemporaryDirectory scratch_ = MakeScratch();
  std::vector<Device> devices_ = {{.tag = "first", .blocks = kDeviceBlocks},
                                  {.tag = std::string(64, 'x'), .blocks = kDeviceBlocks}};
  std::vector<std::string> device_paths_;
  std::string image_path_;
  std::string mount_point_;
  std::unique_ptr<KernelMount> mount_;
};

TEST_F(KernelTest, ShowsAnEmptyTree) {
  Tree tree;
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  EXPECT_EQ(DescribeDirectory(mount_->path()), Describe(tree));
}

TEST_F(KernelTest, ShowsEveryTypeOfFile) {
  Tree tree;
  const InodeIndex directory = *tree.Create(Tree::kRoot, "dir", {.mode = S_IFDIR | 01777});
  ASSERT_TRUE(tree.Create(directory, "regular", Contiguous(100)).ok());
  ASSERT_TRUE(
      tree.Create(directory, "char", {.mode = S_IFCHR | 0600, .rdev = makedev(4095, 1048575)})
          .ok());
  ASSERT_TRUE(
      tree.Create(directory, "block", {.mode = S_IFBLK | 0660, .rdev = makedev(8, 257)}).ok());
  ASSERT_TRUE(tree.Create(directory, "whiteout", {.mode = S_IFCHR, .rdev = 0}).ok());
  ASSERT_TRUE(tree.Create(directory, "fifo", {.mode = S_IFIFO | 0600}).ok());
  ASSERT_TRUE(tree.Create(directory, "socket", {.mode = S_IFSOCK | 0755}).ok());
  for (const size_t length : {1, 59, 4031, 4032, 4063, 4064, 4065, 4094, 4095}) {
    ASSERT_TRUE(tree.Create(directory, fmt::format("link{}", length),
                            {.mode = S_IFLNK | 0777, .target = std::string(length, 't')})
                    .ok());
  }
  ASSERT_TRUE(tree.Create(directory, "suid", {.mode = S_IFREG | 07755}).ok());
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  EXPECT_EQ(DescribeDirectory(mount_->path()), Describe(tree));
}

TEST_F(KernelTest, ShowsOwnersAndTimesOfAnySize) {
  Tree tree;
  int number = 0;
  const auto add = [&](Inode inode) {
    inode.mode = S_IFREG | 0600;
    ASSERT_TRUE(tree.Create(Tree::kRoot, fmt::format("f{}", number++), std::move(inode)).ok());
  };
  for (const uint32_t id : {0u, 65534u, 65535u, 65536u, 2097152u, 4294967294u}) {
    add({.uid = id});
    add({.gid = id});
  }
  for (const int64_t seconds :
       {0l, -1l, -2208988800l, 1l << 31, 1l << 32, 1l << 34, 253402300799l}) {
    add({.mtime = {seconds, 0}});
    add({.mtime = {seconds, 999'999'999}});
  }
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  EXPECT_EQ(DescribeDirectory(mount_->path()), Describe(tree));
}

TEST_F(KernelTest, ShowsACommonTimeBefore1970) {
  Tree tree;
  for (int i = 0; i < 5; ++i) {
    Inode inode = File(0);
    inode.mtime = {-1'000'000'000, 5};
    ASSERT_TRUE(tree.Create(Tree::kRoot, std::to_string(i), inode).ok());
  }
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  EXPECT_EQ(DescribeDirectory(mount_->path()), Describe(tree));
}

TEST_F(KernelTest, ReadsFilesOfBoundarySizes) {
  Tree tree;
  for (const uint64_t size : {1u, 4095u, 4096u, 4097u, 8191u, 8192u, (1u << 20) - 1, 1u << 20,
                              (1u << 20) + 1, kDeviceBlocks * kBlockSize}) {
    ASSERT_TRUE(tree.Create(Tree::kRoot, std::to_string(size), Contiguous(size)).ok());
  }
  ASSERT_TRUE(tree.Create(Tree::kRoot, "empty", File(0)).ok());
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  EXPECT_EQ(DescribeDirectory(mount_->path()), Describe(tree));
  CheckAllContent(tree);
}

TEST_F(KernelTest, ReadsScatteredFilesFromSeveralDevices) {
  Tree tree;
  Inode scattered = File(16 * 4096 + 5);
  for (uint32_t i = 0; i < 17; ++i) {
    scattered.extents.push_back({.offset = i * 4096u,
                                 .length = i == 16 ? 5u : 4096u,
                                 .device = static_cast<uint16_t>(1 + i % 2),
                                 .block = 1000 - 7 * i});
  }
  ASSERT_TRUE(tree.Create(Tree::kRoot, "scattered", scattered).ok());
  ASSERT_TRUE(tree.Create(Tree::kRoot, "two-parts",
                          File(3 << 20, {{0, 2 << 20, 1, 5}, {2 << 20, 1 << 20, 2, 100}}))
                  .ok());
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  CheckAllContent(tree);
}

TEST_F(KernelTest, FindsHolesAndDataInHugeSparseFiles) {
  constexpr uint64_t kMiB = 1 << 20;
  constexpr uint64_t kGiB = 1 << 30;
  Tree tree;
  ASSERT_TRUE(
      tree.Create(Tree::kRoot, "9G",
                  File(9 * kGiB + 5,
                       {{kGiB, kMiB, 1, 3}, {5 * kGiB, 2 * kMiB, 2, 7}, {9 * kGiB, 5, 1, 900}}))
          .ok());
  ASSERT_TRUE(tree.Create(Tree::kRoot, "hole", File(uint64_t{1} << 50)).ok());
  ASSERT_TRUE(tree.Create(Tree::kRoot, "end", File(5 * kGiB, {{0, kMiB, 1, 0}})).ok());
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  EXPECT_EQ(DescribeDirectory(mount_->path()), Describe(tree));

  const UniqueFd file = *OpenFile(mount_->path() + "/9G", O_RDONLY);
  const auto seek = [&](off_t from, int whence) { return lseek(file.get(), from, whence); };
  EXPECT_EQ(seek(0, SEEK_DATA), static_cast<off_t>(kGiB));
  EXPECT_EQ(seek(kGiB, SEEK_HOLE), static_cast<off_t>(kGiB + kMiB));
  EXPECT_EQ(seek(kGiB + kMiB, SEEK_DATA), static_cast<off_t>(5 * kGiB));
  EXPECT_EQ(seek(5 * kGiB + 1, SEEK_HOLE), static_cast<off_t>(5 * kGiB + 2 * kMiB));
  EXPECT_EQ(seek(8 * kGiB, SEEK_DATA), static_cast<off_t>(9 * kGiB));
  EXPECT_EQ(seek(9 * kGiB, SEEK_HOLE), static_cast<off_t>(9 * kGiB + 5));

  std::string block(kBlockSize, '\0');
  const auto read = [&](uint64_t offset) {
    block.assign(kBlockSize, '?');
    const ssize_t length = pread(file.get(), block.data(), block.size(), offset);
    return block.substr(0, std::max<ssize_t>(length, 0));
  };
  EXPECT_EQ(read(0), std::string(kBlockSize, '\0'));
  EXPECT_EQ(read(kGiB + kMiB - kBlockSize), BlockContent(1, 3 + 255));
  EXPECT_EQ(read(kGiB + kMiB), std::string(kBlockSize, '\0'));
  EXPECT_EQ(read(5 * kGiB), BlockContent(2, 7));
  EXPECT_EQ(read(9 * kGiB), BlockContent(1, 900).substr(0, 5));
}

TEST_F(KernelTest, KeepsHardLinksAcrossDirectories) {
  Tree tree;
  const InodeIndex file = *tree.Create(Tree::kRoot, "a", Contiguous(5000, 9));
  const InodeIndex directory = *tree.Create(Tree::kRoot, "dir", {.mode = S_IFDIR | 0755});
  ASSERT_TRUE(tree.Link(directory, "b", file).ok());
  ASSERT_TRUE(tree.Link(directory, "c", file).ok());
  const InodeIndex link = *tree.Create(directory, "l", {.mode = S_IFLNK | 0777, .target = "x"});
  ASSERT_TRUE(tree.Link(Tree::kRoot, "l2", link).ok());
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  EXPECT_EQ(DescribeDirectory(mount_->path()), Describe(tree));
  CheckAllContent(tree);
}

TEST_F(KernelTest, CountsMoreLinksThanACompactInodeHolds) {
  Tree tree;
  const InodeIndex file = *tree.Create(Tree::kRoot, "file", Contiguous(1));
  const InodeIndex directory = *tree.Create(Tree::kRoot, "dirs", {.mode = S_IFDIR | 0755});
  for (int i = 0; i < 66000; ++i) {
    ASSERT_TRUE(tree.Link(Tree::kRoot, fmt::format("link{}", i), file).ok());
    ASSERT_TRUE(tree.Create(directory, std::to_string(i), {.mode = S_IFDIR | 0755}).ok());
  }
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  struct stat status;
  ASSERT_EQ(stat((mount_->path() + "/link65999").c_str(), &status), 0);
  EXPECT_EQ(status.st_nlink, 66001u);
  ASSERT_EQ(stat((mount_->path() + "/dirs").c_str(), &status), 0);
  EXPECT_EQ(status.st_nlink, 66002u);
}

TEST_F(KernelTest, ShowsXattrsOfAllNameSpacesAndSizes) {
  Tree tree;
  // user::rw-, user:1:r--, group::r--, mask::r--, other::---, as getxattr gives it.
  const std::string acl(
      "\x02\0\0\0\x01\0\6\0\xff\xff\xff\xff\x02\0\4\0\x01\0\0\0\x04\0\4\0\xff\xff\xff\xff"
      "\x10\0\4\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff",
      44);
  const std::string capability("\1\0\0\2\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 20);
  Inode rich = File(0);
  rich.xattrs = {
      {"security.capability", capability},    {"security.selinux", "system_u:object_r:bin_t:s0"},
      {"system.posix_acl_access", acl},       {"trusted." + std::string(247, 'n'), "long name"},
      {"trusted.overlay.opaque", "y"},        {"user.empty", ""},
      {"user.large", std::string(65535, 'v')}};
  rich.mode = S_IFREG | 0640;
  ASSERT_TRUE(tree.Create(Tree::kRoot, "rich", rich).ok());
  ASSERT_TRUE(tree.Create(Tree::kRoot, "twin", rich).ok());
  Inode directory = {.mode = S_IFDIR | 0750};
  directory.xattrs = {{"system.posix_acl_access", acl}, {"system.posix_acl_default", acl}};
  ASSERT_TRUE(tree.Create(Tree::kRoot, "dir", directory).ok());
  Inode many = File(7, {{0, 7, 1, 1}});
  for (int i = 0; i < 300; ++i) many.xattrs.push_back({fmt::format("user.{:03}", i), "shared"});
  ASSERT_TRUE(tree.Create(Tree::kRoot, "many", many).ok());
  ASSERT_TRUE(tree.Create(Tree::kRoot, "many-too", many).ok());
  Inode link = {.mode = S_IFLNK | 0777, .target = "target"};
  link.xattrs = {{"security.selinux", "system_u:object_r:bin_t:s0"},
                 {"trusted.big", std::string(5000, 'b')}};
  ASSERT_TRUE(tree.Create(Tree::kRoot, "link", link).ok());
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  EXPECT_EQ(DescribeDirectory(mount_->path()), Describe(tree));

  char value[8];
  const std::string path = mount_->path() + "/rich";
  EXPECT_EQ(getxattr(path.c_str(), "user.absent", value, sizeof(value)), -1);
  EXPECT_EQ(errno, ENODATA);
  const CommandResult getfacl = RunCommand("getfacl -np " + path);
  EXPECT_TRUE(getfacl.ok);
  EXPECT_THAT(getfacl.output, testing::HasSubstr("user:1:r--"));
}

TEST_F(KernelTest, ListsAndSeeksInADirectoryOf100000Entries) {
  Tree tree;
  const InodeIndex big = *tree.Create(Tree::kRoot, "big", {.mode = S_IFDIR | 0755});
  std::vector<std::string> names;
  for (int i = 0; i < 100'000; ++i) {
    // Names of 1 to 255 bytes, some of them not UTF-8.
    std::string name = fmt::format("{}\xff\xfe", i);
    name.resize(std::max<size_t>(name.size(), i % 50 == 0 ? 255 : i % 40), '\xc3');
    ASSERT_TRUE(tree.Create(big, name, File(0)).ok());
    names.push_back(name);
  }
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  names.insert(names.end(), {".", ".."});
  std::sort(names.begin(), names.end());

  const std::string path = mount_->path() + "/big";
  DIR* directory = opendir(path.c_str());
  ASSERT_NE(directory, nullptr);
  std::vector<std::string> listed;
  std::vector<std::pair<long, std::string>> positions;
  while (true) {
    const long position = telldir(directory);
    const dirent* entry = readdir(directory);
    if (entry == nullptr) break;
    listed.push_back(entry->d_name);
    if (listed.size() % 997 == 0) positions.emplace_back(position, entry->d_name);
  }
  EXPECT_EQ(listed, names);
  for (auto it = positions.rbegin(); it != positions.rend(); ++it) {
    seekdir(directory, it->first);
    const dirent* entry = readdir(directory);
    ASSERT_NE(entry, nullptr);
    EXPECT_EQ(entry->d_name, it->second);
  }
  closedir(directory);
  struct stat status;
  for (size_t i = 0; i < names.size(); i += 101) {
    EXPECT_EQ(stat((path + "/" + names[i]).c_str(), &status), 0) << names[i];
  }
  EXPECT_EQ(stat((path + "/absent").c_str(), &status), -1);
}

TEST_F(KernelTest, MountsDevicesJoinedIntoOneFile) {
  Tree tree;
  ASSERT_TRUE(tree.Create(Tree::kRoot, "one", Contiguous(9000, 17)).ok());
  ASSERT_TRUE(tree.Create(Tree::kRoot, "two", File(9000, {{0, 9000, 2, 23}})).ok());
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  mount_.reset();
  // Each part is padded to 2 MiB, as Lamina pads its files.
  const CommandResult join = RunCommand(fmt::format(
      "cd {} && truncate -s %2M image device1 device2 && cat image device1 device2 > joined",
      scratch_.path()));
  ASSERT_TRUE(join.ok) << join.output;
  absl::StatusOr<KernelMount> mount =
      KernelMount::Create(scratch_.path() + "/joined", {}, mount_point_);
  ASSERT_TRUE(mount.ok()) << mount.status();
  mount_ = std::make_unique<KernelMount>(*std::move(mount));
  CheckAllContent(tree);
}

TEST_F(KernelTest, ReportsAnErrorInsteadOfMetadataWhenDevicesAreMissing) {
  Tree tree;
  ASSERT_TRUE(tree.Create(Tree::kRoot, "file", Contiguous(9000)).ok());
  ASSERT_NO_FATAL_FAILURE(Mount(tree));
  mount_.reset();
  ASSERT_TRUE(RunCommand("truncate -s %2M " + image_path_).ok);
  absl::StatusOr<KernelMount> mount = KernelMount::Create(image_path_, {}, mount_point_);
  ASSERT_TRUE(mount.ok()) << mount.status();
  mount_ = std::make_unique<KernelMount>(*std::move(mount));
  const UniqueFd file = *OpenFile(mount_->path() + "/file", O_RDONLY);
  char byte;
  EXPECT_EQ(pread(file.get(), &byte, 1, 0), -1);
  EXPECT_EQ(errno, EIO);
}

TEST_F(KernelTest, AgreesWithTheReaderOnRandomTrees) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const Tree tree = RandomTree(seed, seed % 5 == 0 ? 3000 : 200, devices_);
    ASSERT_NO_FATAL_FAILURE(Mount(tree, "--extract"));
    const std::string expected = Describe(tree);
    EXPECT_EQ(DescribeDirectory(mount_->path()), expected);
    CheckAllContent(tree);
    mount_.reset();

    const std::string image = *ReadFileToString(image_path_, 1 << 30);
    const absl::StatusOr<Reader> reader = Reader::Open(AsBytes(image));
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(DescribeImage(*reader), expected);
  }
}

}  // namespace
}  // namespace lamina::erofs
