// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <iterator>

#include "chunkstore/base/file.h"
#include "erofs/import.h"
#include "tests/erofs/import_testing.h"

namespace lamina::erofs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ImportDirectoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<TemporaryDirectory> directory =
        TemporaryDirectory::Create(::testing::TempDir(), "import-directory");
    ASSERT_TRUE(directory.ok()) << directory.status();
    directory_.emplace(*std::move(directory));
    Do("umask 022; mkdir source; chmod 755 source");
  }
  void TearDown() override {
    if (directory_) ::umount2(Path("source/mounted").c_str(), MNT_DETACH);
  }

  std::string Path(std::string_view name) const {
    return fmt::format("{}/{}", directory_->path(), name);
  }
  void Do(const std::string& commands) {
    Shell(fmt::format("cd {} && {}", directory_->path(), commands));
  }
  void InSource(const std::string& commands) { Do("umask 022; cd source && " + commands); }

  Tree Import() {
    absl::StatusOr<Tree> tree = ImportDirectory(Path("source"), sink_);
    EXPECT_TRUE(tree.ok()) << tree.status();
    return tree.ok() ? *std::move(tree) : Tree();
  }
  std::string Lines(DescribeOptions options = {.root = false, .mtime = false}) {
    return Describe(Import(), sink_, options);
  }

  std::optional<TemporaryDirectory> directory_;
  RecordingSink sink_;
};

void RequireRoot() {
  if (::geteuid() != 0) GTEST_SKIP() << "devices, mounts and owners need root";
}

TEST_F(ImportDirectoryTest, EveryFileTypeKeepsItsAttributes) {
  RequireRoot();
  InSource(R"(printf abc > f; chown 70000:3000000000 f; chmod 6711 f; ln -s nowhere l
      mkdir -m 1700 d; mkfifo -m 600 p; mknod c c 1 3; mknod b b 259 1048575; mknod zero c 0 0
      setfattr -n user.a -v 1 f; setfattr -n trusted.b -v 2 d; setfacl -m u:5:r f
      touch -d '1969-12-31 23:59:58.25 UTC' f; touch -h -d @5.5 l; touch -d @6 d p c b zero .)");
  EXPECT_EQ(Describe(Import(), sink_),
            "/ directory 0755 0:0 6.000000000\n"
            "/b block 0644 0:0 6.000000000 259:1048575\n"
            "/c character 0644 0:0 6.000000000 1:3\n"
            "/d directory 1700 0:0 6.000000000 trusted.b=2\n"
            "/f file 6751 70000:3000000000 -2.250000000 3 bytes \"abc\""
            " system.posix_acl_access=\\x02\\x00\\x00\\x00\\x01\\x00\\x07\\x00\\xff\\xff\\xff\\xff"
            "\\x02\\x00\\x04\\x00\\x05\\x00\\x00\\x00\\x04\\x00\\x01\\x00\\xff\\xff\\xff\\xff"
            "\\x10\\x00\\x05\\x00\\xff\\xff\\xff\\xff \\x00\\x01\\x00\\xff\\xff\\xff\\xff"
            " user.a=1\n"
            "/l symlink 0777 0:0 5.500000000 -> nowhere\n"
            "/p fifo 0600 0:0 6.000000000\n"
            // A device 0:0 in a root directory stays: there the directory is what counts.
            "/zero character 0644 0:0 6.000000000 0:0\n");
}

TEST_F(ImportDirectoryTest, EmptyDirectoryIsAnEmptyRoot) {
  EXPECT_EQ(Lines(), "");
  EXPECT_EQ(Import().inode(Tree::kRoot).mode, S_IFDIR | 0755);
}

TEST_F(ImportDirectoryTest, SocketsAreKept) {
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX};
  const std::string path = Path("source/s");
  ASSERT_LT(path.size(), sizeof address.sun_path);
  path.copy(address.sun_path, path.size());
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(At(Import(), "s").mode & S_IFMT, S_IFSOCK);
}

TEST_F(ImportDirectoryTest, HardLinksAreOneInode) {
  InSource("mkdir d; printf x > a; ln a d/b; ln a z; ln -s t s; ln s s2");
  EXPECT_EQ(Lines(),
            "/a file 0644 0:0 1 bytes \"x\"\n"
            "/d directory 0755 0:0\n"
            "/d/b file 0644 0:0 1 bytes \"x\" linked to /a\n"
            "/s symlink 0777 0:0 -> t\n"
            "/s2 symlink 0777 0:0 -> t linked to /s\n"
            "/z file 0644 0:0 1 bytes \"x\" linked to /a\n");
}

TEST_F(ImportDirectoryTest, HardLinksFromOutsideTheDirectoryDoNotMatter) {
  Do("printf x > outside; ln outside source/in");
  const Tree tree = Import();
  EXPECT_EQ(tree.link_count(*tree.Find(Tree::kRoot, "in")), 1U);
}

TEST_F(ImportDirectoryTest, SymlinksAreNotFollowed) {
  Do("mkdir outside; printf x > outside/secret; ln -s ../outside source/l");
  EXPECT_EQ(Lines(), "/l symlink 0777 0:0 -> ../outside\n");
}

TEST_F(ImportDirectoryTest, HolesAreFound) {
  InSource(R"(truncate -s 1M f; printf data | dd of=f bs=4096 seek=10 conv=notrunc status=none
      truncate -s 9M g; printf x > h; truncate -s 10000 h)");
  EXPECT_EQ(
      Describe(Import(), sink_, {.root = false, .mtime = false, .extents = true}).substr(0, 3),
      "/f ");
  const Tree tree = Import();
  ASSERT_EQ(At(tree, "f").extents.size(), 1U);
  EXPECT_EQ(At(tree, "f").extents[0].offset, 40960U);
  EXPECT_EQ(sink_.Read(At(tree, "f")).substr(40960, 4), "data");
  EXPECT_TRUE(At(tree, "g").extents.empty());
  EXPECT_EQ(sink_.Read(At(tree, "h")), "x" + std::string(9999, '\0'));
}

TEST_F(ImportDirectoryTest, OverlayXattrsAreDropped) {
  RequireRoot();
  InSource(R"(mkdir d; setfattr -n trusted.overlay.opaque -v y d
      setfattr -n user.overlay.redirect -v /x d; setfattr -n user.kept -v 1 d)");
  EXPECT_EQ(Lines(), "/d directory 0755 0:0 user.kept=1\n");
}

TEST_F(ImportDirectoryTest, XattrsOfEverySizeAreRead) {
  // A large value, and names whose list is longer than one try.
  InSource(": > f");
  for (int i = 0; i < 40; ++i) {
    const std::string name = fmt::format("user.some-long-name-{}", i);
    ASSERT_EQ(::setxattr(Path("source/f").c_str(), name.c_str(), &i, 1, 0), 0);
  }
  const Tree tree = Import();
  EXPECT_EQ(At(tree, "f").xattrs.size(), 40U);
  EXPECT_EQ(XattrOf(At(tree, "f"), "user.some-long-name-39"), "\x27");
  InSource(R"(: > g; setfattr -n user.large -v $(printf '%02000d' 1) g)");
  EXPECT_EQ(XattrOf(At(Import(), "g"), "user.large").size(), 2000U);
}

TEST_F(ImportDirectoryTest, OtherMountsAreNotCrossed) {
  RequireRoot();
  InSource("mkdir -m 700 mounted; : > before");
  ASSERT_EQ(::mount("none", Path("source/mounted").c_str(), "tmpfs", 0, "mode=711"), 0);
  WriteTestFile(Path("source/mounted/inside"), "x");
  EXPECT_EQ(Lines(), "/before file 0644 0:0 0 bytes \"\"\n/mounted directory 0711 0:0\n");
}

TEST_F(ImportDirectoryTest, BindMountsOfTheSameFileSystemAreNotCrossed) {
  RequireRoot();
  Do("mkdir source/mounted outside; : > outside/file");
  ASSERT_EQ(
      ::mount(Path("outside").c_str(), Path("source/mounted").c_str(), nullptr, MS_BIND, nullptr),
      0);
  EXPECT_EQ(Lines(), "/mounted directory 0755 0:0\n");
}

// Lowers the number of descriptors that may be open, for as long as it lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t limit) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit lower{limit, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &lower), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST_F(ImportDirectoryTest, TreesDeeperThanAnyPathAreReadWithFewDescriptors) {
  constexpr int kDepth = 1000;
  const absl::StatusOr<UniqueFd> root = OpenFile(Path("source"), O_RDONLY | O_DIRECTORY);
  ASSERT_TRUE(root.ok());
  const std::string name(200, 'd');
  UniqueFd current(::dup(root->get()));
  for (int i = 0; i < kDepth; ++i) {
    ASSERT_EQ(::mkdirat(current.get(), name.c_str(), 0755), 0);
    current.Reset(::openat(current.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    ASSERT_TRUE(current.valid());
  }
  ASSERT_TRUE(UniqueFd(::openat(current.get(), "f", O_CREAT | O_CLOEXEC | O_WRONLY, 0644)).valid());
  current.Reset();

  const DescriptorLimit limit(64);
  const Tree tree = Import();
  InodeIndex index = Tree::kRoot;
  for (int i = 0; i < kDepth; ++i) {
    const std::optional<InodeIndex> next = tree.Find(index, name);
    ASSERT_TRUE(next);
    index = *next;
  }
  EXPECT_TRUE(tree.Find(index, "f"));
  Do("rm -rf source");  // knows how to, unlike the removal of a temporary directory by path
}

TEST_F(ImportDirectoryTest, NamesThatAreNotUtf8AreKept) {
  const std::string name = "\xff\xfe\n";
  WriteTestFile(Path("source/" + name), "x");
  EXPECT_TRUE(Exists(Import(), name));
}

TEST_F(ImportDirectoryTest, SameTreeGivesTheSameOrderOfContent) {
  class OrderSink : public RecordingSink {
   public:
    absl::Status Append(std::span<const std::byte> data) override {
      order += AsText(data);
      return RecordingSink::Append(data);
    }
    std::string order;
  };
  InSource("for i in z b a y; do printf $i > $i; done; mkdir m; printf 1 > m/1; printf x > m-");
  OrderSink sink;
  ASSERT_TRUE(ImportDirectory(Path("source"), sink).ok());
  EXPECT_EQ(sink.order, "ab1xyz");
}

TEST_F(ImportDirectoryTest, MissingDirectoryIsAnErrorThatNamesIt) {
  const absl::Status status = ImportDirectory(Path("gone"), sink_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("gone"));
}

TEST_F(ImportDirectoryTest, FileInPlaceOfADirectoryIsAnError) {
  Do(": > f");
  EXPECT_THAT(std::string(ImportDirectory(Path("f"), sink_).status().message()), HasSubstr("f"));
}

TEST_F(ImportDirectoryTest, UnreadableFileIsAnErrorThatNamesIt) {
  RequireRoot();
  InSource("mkdir d; printf x > d/f; chmod 600 d/f");
  Do("chmod 755 . ..");
  ASSERT_EQ(::seteuid(65534), 0);
  const absl::StatusOr<Tree> tree = ImportDirectory(Path("source"), sink_);
  ASSERT_EQ(::seteuid(0), 0);
  EXPECT_EQ(tree.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(tree.status().message()), HasSubstr("source/d/f"));
}

// Calls a function when the first bytes of a file arrive.
class InterferingSink : public CountingSink {
 public:
  explicit InterferingSink(std::function<void()> action) : action_(std::move(action)) {}
  absl::Status Append(std::span<const std::byte> data) override {
    if (action_) std::exchange(action_, nullptr)();
    return CountingSink::Append(data);
  }

 private:
  std::function<void()> action_;
};

TEST_F(ImportDirectoryTest, FileThatShrinksWhileReadIsAnError) {
  InSource("head -c 1000000 /dev/zero > f");
  InterferingSink sink([&] { InSource("truncate -s 300000 f"); });
  const absl::Status status = ImportDirectory(Path("source"), sink).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("source/f"), HasSubstr("shrank to 300000 bytes")));
}

TEST_F(ImportDirectoryTest, FileThatGrowsWhileReadIsAnError) {
  InSource("head -c 1000000 /dev/zero > f");
  InterferingSink sink([&] { InSource("printf more >> f"); });
  const absl::Status status = ImportDirectory(Path("source"), sink).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("source/f"), HasSubstr("from 1000000 bytes to 1000004")));
}

TEST_F(ImportDirectoryTest, DirectoryMovedWhileReadIsAnErrorAndNotAWayOut) {
  InSource("mkdir -p a/b; printf x > a/b/f; printf y > a/g");
  InterferingSink sink([&] { Do("mv source/a/b elsewhere"); });
  const absl::Status status = ImportDirectory(Path("source"), sink).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("source/a/b/: directory was moved"));
}

TEST_F(ImportDirectoryTest, LeavesNoDescriptorBehind) {
  InSource("mkdir -p a/b/c; printf x > a/b/f; ln -s x a/l");
  const auto count = [] {
    const std::filesystem::directory_iterator descriptors("/proc/self/fd");
    return std::distance(begin(descriptors), end(descriptors));
  };
  const auto before = count();
  for (int i = 0; i < 5; ++i) Import();
  EXPECT_EQ(count(), before);
}

}  // namespace
}  // namespace lamina::erofs
