// SPDX-License-Identifier: Apache-2.0
#include "erofs/merge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <random>

#include "tests/erofs/erofs_testing.h"

namespace lamina::erofs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A layer in the making: paths such as "a/b"; parents are made as they are needed.
class Layer {
 public:
  Layer& File(std::string_view path, uint32_t block = 0) {
    Inode inode = {.mode = S_IFREG | 0644, .size = 10};
    inode.extents = {{.offset = 0, .length = 10, .device = 1, .block = block}};
    return Add(path, std::move(inode));
  }
  Layer& Directory(std::string_view path, uint16_t mode = 0755, std::vector<Xattr> xattrs = {}) {
    Inode inode = {.mode = static_cast<uint16_t>(S_IFDIR | mode)};
    inode.xattrs = std::move(xattrs);
    return Add(path, std::move(inode));
  }
  Layer& Opaque(std::string_view path) {
    return Directory(path, 0755, {{"trusted.overlay.opaque", "y"}});
  }
  Layer& Whiteout(std::string_view path) { return Add(path, {.mode = S_IFCHR}); }
  Layer& XattrWhiteout(std::string_view path, std::string_view prefix) {
    Inode inode = {.mode = S_IFREG};
    inode.xattrs = {{fmt::format("{}.overlay.whiteout", prefix), ""}};
    return Add(path, std::move(inode));
  }
  Layer& Link(std::string_view path, std::string_view target) {
    const auto [directory, name] = Split(path);
    const auto [target_directory, target_name] = Split(target);
    EXPECT_TRUE(tree_.Link(directory, name, *tree_.Find(target_directory, target_name)).ok());
    return *this;
  }
  Layer& Add(std::string_view path, Inode inode) {
    const auto [directory, name] = Split(path);
    EXPECT_TRUE(tree_.Create(directory, name, std::move(inode)).ok()) << path;
    return *this;
  }

  std::string Build(std::vector<Device> devices = {{.tag = "blob", .blocks = 100'000}}) const {
    return BuildImage(tree_, {.devices = std::move(devices)}).value();
  }

  Tree& tree() { return tree_; }

 private:
  std::pair<InodeIndex, std::string_view> Split(std::string_view path) {
    InodeIndex directory = Tree::kRoot;
    for (size_t slash; (slash = path.find('/')) != path.npos; path.remove_prefix(slash + 1)) {
      const std::string_view name = path.substr(0, slash);
      const std::optional<InodeIndex> found = tree_.Find(directory, name);
      directory =
          found.has_value() ? *found : *tree_.Create(directory, name, {.mode = S_IFDIR | 0755});
    }
    return {directory, path};
  }

  Tree tree_;
};

absl::StatusOr<Tree> MergeImages(const std::vector<std::string>& images) {
  std::deque<Reader> readers;
  std::vector<const Reader*> layers;
  for (const std::string& image : images) {
    layers.push_back(&readers.emplace_back(Reader::Open(AsBytes(image)).value()));
  }
  return MergeLayers(layers);
}

Tree Merge(const std::vector<Layer*>& layers) {
  std::vector<std::string> images;
  for (const Layer* layer : layers) images.push_back(layer->Build());
  return MergeImages(images).value();
}

// "path device:block" of files, "path/" of directories.
std::vector<std::string> List(const Tree& tree) {
  std::map<std::string, std::string> lines;
  std::vector<std::pair<std::string, InodeIndex>> pending = {{"", Tree::kRoot}};
  for (size_t i = 0; i < pending.size(); ++i) {
    const auto [path, directory] = pending[i];
    for (const DirectoryEntry& entry : tree.Entries(directory)) {
      const Inode& inode = tree.inode(entry.inode);
      const std::string child = path + std::string(entry.name);
      if (inode.is_directory()) {
        lines[child] = child + "/";
        pending.emplace_back(child + "/", entry.inode);
      } else if (!inode.extents.empty()) {
        lines[child] =
            fmt::format("{} {}:{}", child, inode.extents[0].device, inode.extents[0].block);
      } else {
        lines[child] = child;
      }
    }
  }
  std::vector<std::string> result;
  for (const auto& [path, line] : lines) result.push_back(line);
  return result;
}

TEST(MergeTest, JoinsDirectoriesAndReplacesFiles) {
  Layer lower, upper;
  lower.File("etc/a", 1).File("etc/b", 2);
  upper.File("etc/b", 3).File("etc/c", 4);
  EXPECT_THAT(List(Merge({&lower, &upper})),
              ElementsAre("etc/", "etc/a 1:1", "etc/b 2:3", "etc/c 2:4"));
}

TEST(MergeTest, TakesDirectoryAttributesFromTheUppermost) {
  Layer lower, middle, upper;
  lower.Directory("d", 0700, {{"user.old", "1"}}).File("d/f");
  middle.Directory("d", 0711, {{"user.new", "2"}});
  upper.File("other");
  upper.tree().inode(Tree::kRoot).mode = S_IFDIR | 0500;
  upper.tree().inode(Tree::kRoot).mtime = {77, 7};
  const Tree merged = Merge({&lower, &middle, &upper});
  const Inode& directory = merged.inode(*merged.Find(Tree::kRoot, "d"));
  EXPECT_EQ(directory.mode, S_IFDIR | 0711);
  EXPECT_THAT(directory.xattrs, ElementsAre(Xattr{"user.new", "2"}));
  EXPECT_EQ(merged.inode(Tree::kRoot).mode, S_IFDIR | 0500);
  EXPECT_EQ(merged.inode(Tree::kRoot).mtime, (Timestamp{77, 7}));
}

TEST(MergeTest, ImpliedDirectoriesKeepTheAttributesBelow) {
  Layer lower;
  lower.Directory("tmp", 01777, {{"user.note", "kept"}});
  lower.tree().inode(Tree::kRoot).mode = S_IFDIR | 0700;
  Layer upper;
  upper.Directory("tmp", 0755, {{std::string(kImpliedXattr), "y"}}).File("tmp/new");
  upper.Directory("alone", 0755, {{std::string(kImpliedXattr), "y"}}).File("alone/new");
  upper.tree().inode(Tree::kRoot).xattrs = {{std::string(kImpliedXattr), "y"}};
  const Tree tree = Merge({&lower, &upper});
  EXPECT_EQ(tree.inode(Tree::kRoot).mode, S_IFDIR | 0700);
  const Inode& joined = tree.inode(*tree.Find(Tree::kRoot, "tmp"));
  EXPECT_EQ(joined.mode, S_IFDIR | 01777);
  EXPECT_EQ(joined.xattrs, (std::vector<Xattr>{{"user.note", "kept"}}));
  const Inode& alone = tree.inode(*tree.Find(Tree::kRoot, "alone"));
  EXPECT_EQ(alone.mode, S_IFDIR | 0755);
  EXPECT_TRUE(alone.xattrs.empty());
}

TEST(MergeTest, ImpliedOpaqueDirectoryKeepsAttributesButNotContent) {
  Layer lower;
  lower.Directory("d", 0700).File("d/old");
  Layer upper;
  upper.Directory("d", 0755, {{std::string(kImpliedXattr), "y"}, {"trusted.overlay.opaque", "y"}})
      .File("d/new");
  const Tree tree = Merge({&lower, &upper});
  const InodeIndex d = *tree.Find(Tree::kRoot, "d");
  EXPECT_EQ(tree.inode(d).mode, S_IFDIR | 0700);
  EXPECT_FALSE(tree.Find(d, "old").has_value());
  EXPECT_TRUE(tree.Find(d, "new").has_value());
}

TEST(MergeTest, WhiteoutsReachThroughManyLayers) {
  Layer a, b, c, d;
  a.File("x/one").File("x/two").File("y");
  b.File("x/three");
  c.File("z");
  d.Whiteout("x").Whiteout("y");
  EXPECT_THAT(List(Merge({&a, &b, &c, &d})), ElementsAre("z 3:0"));
}

TEST(MergeTest, WhatIsCreatedAfterAWhiteoutIsNew) {
  Layer a, b, c;
  a.File("d/old").File("f", 1);
  b.Whiteout("d").Whiteout("f");
  c.File("d/new", 2).File("f", 3);
  EXPECT_THAT(List(Merge({&a, &b, &c})), ElementsAre("d/", "d/new 3:2", "f 3:3"));
}

TEST(MergeTest, FilesAndDirectoriesReplaceEachOther) {
  Layer a, b, c;
  a.File("x/below").File("y");
  b.File("x", 5).File("y/below", 6);
  c.File("x/again", 7).Add("y", {.mode = S_IFLNK | 0777, .target = "x"});
  EXPECT_THAT(List(Merge({&a, &b})), ElementsAre("x 2:5", "y/", "y/below 2:6"));
  EXPECT_THAT(List(Merge({&a, &b, &c})), ElementsAre("x/", "x/again 3:7", "y"));
}

TEST(MergeTest, OpaqueDirectoriesHideWhatIsBelow) {
  Layer a, b, c;
  a.File("d/a/x").File("d/b").File("e");
  b.Opaque("d").File("d/c", 1);
  c.File("d/f", 2);
  const Tree merged = Merge({&a, &b, &c});
  EXPECT_THAT(List(merged), ElementsAre("d/", "d/c 2:1", "d/f 3:2", "e 1:0"));
  EXPECT_TRUE(merged.inode(*merged.Find(Tree::kRoot, "d")).xattrs.empty());
}

TEST(MergeTest, AnOpaqueRootHidesEverything) {
  Layer a, b;
  a.File("gone");
  b.File("new");
  b.tree().inode(Tree::kRoot).xattrs = {{"user.overlay.opaque", "y"}};
  const Tree merged = Merge({&a, &b});
  EXPECT_THAT(List(merged), ElementsAre("new 2:0"));
  EXPECT_TRUE(merged.inode(Tree::kRoot).xattrs.empty());
}

TEST(MergeTest, MarksOfTheLowestLayerAreGone) {
  Layer only;
  only.Whiteout("w").Whiteout("d/w").Opaque("o").File("o/f");
  const Tree merged = Merge({&only});
  EXPECT_THAT(List(merged), ElementsAre("d/", "o/", "o/f 1:0"));
  EXPECT_TRUE(merged.inode(*merged.Find(Tree::kRoot, "o")).xattrs.empty());
}

TEST(MergeTest, AWhiteoutOfNothingDoesNothing) {
  Layer a, b;
  a.File("f");
  b.Whiteout("g").Whiteout("new/w");
  EXPECT_THAT(List(Merge({&a, &b})), ElementsAre("f 1:0", "new/"));
}

TEST(MergeTest, KnowsTheXattrFormsOfOverlayfs) {
  Layer a, b;
  a.File("d/a").File("d/b").File("d/c").File("e/gone").File("f/kept");
  b.XattrWhiteout("d/a", "trusted").XattrWhiteout("d/b", "user");
  b.Directory("e", 0755, {{"user.overlay.opaque", "y"}});
  // "x" marks a directory with xattr whiteouts; it does not make it opaque.
  b.Directory("f", 0755, {{"trusted.overlay.opaque", "x"}, {"user.other", "1"}});
  const Tree merged = Merge({&a, &b});
  EXPECT_THAT(List(merged), ElementsAre("d/", "d/c 1:0", "e/", "f/", "f/kept 1:0"));
  EXPECT_THAT(merged.inode(*merged.Find(Tree::kRoot, "f")).xattrs,
              ElementsAre(Xattr{"user.other", "1"}));
}

TEST(MergeTest, HardLinksLoseTheNamesThatAreCovered) {
  Layer a, b, c;
  a.File("one", 4).Link("dir/two", "one").Link("dir/three", "one");
  b.Whiteout("one");
  c.File("dir/two", 9);
  Tree merged = Merge({&a, &b});
  const InodeIndex directory = *merged.Find(Tree::kRoot, "dir");
  EXPECT_EQ(merged.Find(directory, "two"), merged.Find(directory, "three"));
  EXPECT_EQ(merged.link_count(*merged.Find(directory, "two")), 2u);
  merged = Merge({&a, &b, &c});
  EXPECT_EQ(merged.link_count(*merged.Find(*merged.Find(Tree::kRoot, "dir"), "three")), 1u);
  EXPECT_THAT(List(merged), ElementsAre("dir/", "dir/three 1:4", "dir/two 3:9"));
}

TEST(MergeTest, HardLinkedWhiteoutsAllCount) {
  Layer a, b;
  a.File("x").File("y").File("z");
  b.Whiteout("x").Link("y", "x");
  EXPECT_THAT(List(Merge({&a, &b})), ElementsAre("z 1:0"));
}

TEST(MergeTest, KeepsOtherDevicesAndFilesThatOnlyLookLikeWhiteouts) {
  Layer a, b;
  a.File("f").File("g");
  Inode marked = {.mode = S_IFREG, .size = 10, .extents = {{0, 10, 1, 2}}};
  marked.xattrs = {{"trusted.overlay.whiteout", ""}};
  b.Add("f", {.mode = S_IFBLK, .rdev = 0}).Add("g", marked);
  const Tree merged = Merge({&a, &b});
  EXPECT_THAT(List(merged), ElementsAre("f", "g 2:2"));
  EXPECT_TRUE(merged.inode(*merged.Find(Tree::kRoot, "g")).xattrs.empty());
}

TEST(MergeTest, WhatUpperLayersReplaceIsNotKept) {
  constexpr int kFiles = 100;
  Layer first, again;
  for (int i = 0; i < kFiles; ++i) {
    first.File(fmt::format("d/{}", i), 1);
    again.File(fmt::format("d/{}", i), 2);
  }
  again.Link("d/link", "d/0");
  const std::string image = again.Build();
  std::vector<std::string> images(50, image);
  images[0] = first.Build();
  const Tree merged = MergeImages(images).value();
  EXPECT_EQ(merged.name_count(), kFiles + 2u);
  EXPECT_EQ(merged.link_count(*merged.Find(*merged.Find(Tree::kRoot, "d"), "link")), 2u);
  EXPECT_EQ(List(merged)[1], "d/0 50:2");
  // Those there are, as many removed ones at the most, and one layer.
  EXPECT_LE(merged.inode_limit(), 3u * (kFiles + 2));
}

TEST(MergeTest, OfNoLayersIsAnEmptyTree) { EXPECT_EQ(MergeLayers({})->inode_limit(), 1u); }

TEST(MergeTest, RefusesContentOutsideTheLayersDevice) {
  Layer layer;
  Inode inode = {.mode = S_IFREG, .size = 10};
  inode.extents = {{0, 10, 2, 0}};
  layer.Add("d/f", inode);
  const absl::Status status = MergeImages({layer.Build({{"a", 10}, {"b", 10}})}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("merge layer 0: /d/f: inode "));
  EXPECT_THAT(status.message(), HasSubstr("content on device 2"));
}

// The kernel's overlayfs over the same layers is the reference.
class OverlayTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!CanMount()) GTEST_SKIP() << "mounting needs root";
  }

  std::string MakeDirectory(const std::string& name) {
    const std::string path = scratch_.path() + "/" + name;
    EXPECT_EQ(mkdir(path.c_str(), 0755), 0) << path;
    return path;
  }

  TemporaryDirectory scratch_ = MakeScratch();
};

// Names from a small set, so that the layers meet.
Layer RandomLayer(std::mt19937_64& random) {
  const auto below = [&](uint64_t limit) { return random() % limit; };
  Layer layer;
  Tree& tree = layer.tree();
  tree.inode(Tree::kRoot).mode = static_cast<uint16_t>(S_IFDIR | 0700 | below(0100));
  std::vector<InodeIndex> directories = {Tree::kRoot};
  for (int i = 0; i < 60; ++i) {
    const InodeIndex directory = directories[below(directories.size())];
    const std::string name(1, static_cast<char>('a' + below(5)));
    Inode inode;
    inode.mtime = {static_cast<int64_t>(below(1000)), 0};
    switch (below(4)) {
      case 0:
        inode.mode = S_IFCHR;  // a whiteout
        break;
      case 1:
        inode.mode = static_cast<uint16_t>(S_IFREG | below(01000));
        break;
      default:
        inode.mode = static_cast<uint16_t>(S_IFDIR | below(01000));
        if (below(4) == 0) inode.xattrs = {{"trusted.overlay.opaque", "y"}};
    }
    const bool is_directory = inode.is_directory();
    const absl::StatusOr<InodeIndex> created = tree.Create(directory, name, std::move(inode));
    if (created.ok() && is_directory) directories.push_back(*created);
  }
  return layer;
}

// Lines of Describe without the link counts, which overlayfs does not know for directories, and
// identities.
std::string WithoutLinks(const std::string& description) {
  std::string result;
  size_t at = 0;
  while (at < description.size()) {
    const size_t end = description.find('\n', at);
    const std::string line = description.substr(at, end - at);
    result += line.substr(0, line.find(" links=")) + "\n";
    at = end + 1;
  }
  return result;
}

TEST_F(OverlayTest, AgreesWithTheKernelOnRandomLayers) {
  const std::string merged_path = MakeDirectory("merged");
  for (uint64_t seed = 1; seed <= 15; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::vector<std::string> images;
    std::deque<KernelMount> mounts;
    std::string lower;
    const std::string device = scratch_.path() + "/device";
    ASSERT_TRUE(WriteFile(device, "").ok());
    for (uint64_t i = 0; i < 2 + seed % 4; ++i) {
      images.push_back(RandomLayer(random).Build());
      const std::string image = fmt::format("{}/image-{}-{}", scratch_.path(), seed, i);
      ASSERT_TRUE(WriteFile(image, images.back()).ok());
      const std::string mount_point = MakeDirectory(fmt::format("layer-{}-{}", seed, i));
      const std::string devices[] = {device};
      absl::StatusOr<KernelMount> mount = KernelMount::Create(image, devices, mount_point);
      ASSERT_TRUE(mount.ok()) << mount.status();
      mounts.push_back(*std::move(mount));
      lower = i == 0 ? mount_point : mount_point + ":" + lower;
    }
    // overlayfs looks for whiteouts and opaque directories above the lowest layer only.
    const std::string empty = MakeDirectory(fmt::format("empty-{}", seed));
    const absl::StatusOr<KernelMount> overlay =
        KernelMount::Overlay(lower + ":" + empty, merged_path);
    ASSERT_TRUE(overlay.ok()) << overlay.status();
    const absl::StatusOr<Tree> merged = MergeImages(images);
    ASSERT_TRUE(merged.ok()) << merged.status();
    EXPECT_EQ(WithoutLinks(Describe(*merged)), WithoutLinks(DescribeDirectory(merged_path)));
  }
}

LayerTree ReadAlone(const Layer& layer) {
  const std::string image = layer.Build();
  return ReadLayer(Reader::Open(AsBytes(image)).value()).value();
}

TEST(ReadLayerTest, KeepsWhatOverlayfsNeedsToKnow) {
  Layer layer;
  layer.File("a/file", 7).Whiteout("a/gone").Opaque("hidden").File("hidden/new", 9);
  const LayerTree read = ReadAlone(layer);
  EXPECT_THAT(List(read.tree),
              ElementsAre("a/", "a/file 1:7", "a/gone", "hidden/", "hidden/new 1:9"));
  const InodeIndex a = *read.tree.Find(Tree::kRoot, "a");
  EXPECT_TRUE(read.tree.inode(*read.tree.Find(a, "gone")).is_whiteout());
  const Inode& hidden = read.tree.inode(*read.tree.Find(Tree::kRoot, "hidden"));
  ASSERT_EQ(hidden.xattrs.size(), 1u);
  EXPECT_EQ(hidden.xattrs[0].name, "trusted.overlay.opaque");
  EXPECT_FALSE(read.marks.implied_root);
  EXPECT_FALSE(read.marks.implied_directories);
}

TEST(ReadLayerTest, TakesNothingElseOfOverlayfsFromAnImage) {
  Layer layer;
  layer.Directory("d", 0755,
                  {{"trusted.overlay.metacopy", ""},
                   {"trusted.overlay.redirect", "/etc"},
                   {"user.kept", "1"},
                   {"user.overlay.origin", "x"}});
  const LayerTree read = ReadAlone(layer);
  const Inode& d = read.tree.inode(*read.tree.Find(Tree::kRoot, "d"));
  ASSERT_EQ(d.xattrs.size(), 1u);
  EXPECT_EQ(d.xattrs[0].name, "user.kept");
}

TEST(ReadLayerTest, MarksTakeTheFormThatEveryKernelKnows) {
  Layer layer;
  layer.Directory("d", 0755, {{"user.overlay.opaque", "y"}})
      .Directory("x", 0755, {{"trusted.overlay.opaque", "x"}})
      .Add("x/gone", {.mode = S_IFREG | 0600, .xattrs = {{"trusted.overlay.whiteout", ""}}})
      .Add("x/file", {.mode = S_IFREG | 0600, .xattrs = {{"trusted.overlay.opaque", "y"}}});
  layer.tree().inode(Tree::kRoot).xattrs = {{"trusted.overlay.opaque", "y"}};
  const LayerTree read = ReadAlone(layer);
  const Inode& d = read.tree.inode(*read.tree.Find(Tree::kRoot, "d"));
  ASSERT_EQ(d.xattrs.size(), 1u);
  EXPECT_EQ(d.xattrs[0].name, "trusted.overlay.opaque");
  EXPECT_EQ(d.xattrs[0].value, "y");
  const InodeIndex x = *read.tree.Find(Tree::kRoot, "x");
  EXPECT_TRUE(read.tree.inode(x).xattrs.empty());
  const Inode& gone = read.tree.inode(*read.tree.Find(x, "gone"));
  EXPECT_TRUE(gone.is_whiteout());
  EXPECT_TRUE(gone.xattrs.empty());
  EXPECT_TRUE(read.tree.inode(*read.tree.Find(x, "file")).xattrs.empty());
  EXPECT_TRUE(read.marks.opaque_root);
}

TEST(ReadLayerTest, SaysWhatTheArchiveHadNoAttributesFor) {
  const std::vector<Xattr> implied = {{std::string(kImpliedXattr), "y"}};
  Layer layer;
  layer.Directory("tmp", 0755, implied).File("tmp/new");
  LayerTree read = ReadAlone(layer);
  EXPECT_TRUE(read.marks.implied_directories);
  EXPECT_FALSE(read.marks.implied_root);
  EXPECT_TRUE(read.tree.inode(*read.tree.Find(Tree::kRoot, "tmp")).xattrs.empty());

  Layer rootless;
  rootless.File("file");
  rootless.tree().inode(Tree::kRoot).xattrs = implied;
  read = ReadAlone(rootless);
  EXPECT_TRUE(read.marks.implied_root);
  EXPECT_FALSE(read.marks.implied_directories);
}

TEST(ReadLayerTest, ContentOfOtherDevicesIsRefused) {
  Layer layer;
  layer.Add("f", {.mode = S_IFREG | 0644,
                  .size = 10,
                  .extents = {{.offset = 0, .length = 10, .device = 2, .block = 0}}});
  const std::string image = layer.Build({{.tag = "a", .blocks = 10}, {.tag = "b", .blocks = 10}});
  const auto read = ReadLayer(Reader::Open(AsBytes(image)).value());
  EXPECT_THAT(std::string(read.status().message()), HasSubstr("a layer has only device 1"));
}

}  // namespace
}  // namespace lamina::erofs
