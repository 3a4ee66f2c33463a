// SPDX-License-Identifier: Apache-2.0
#include "erofs/tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lamina::erofs {
namespace {

Inode File() { return {.mode = S_IFREG | 0644}; }
Inode Directory() { return {.mode = S_IFDIR | 0755}; }

std::vector<std::string> Names(const Tree& tree, InodeIndex directory) {
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : tree.Entries(directory)) names.emplace_back(entry.name);
  return names;
}

TEST(TreeTest, StartsWithAnEmptyRoot) {
  const Tree tree;
  EXPECT_EQ(tree.inode(Tree::kRoot).mode, S_IFDIR | 0755);
  EXPECT_EQ(tree.Parent(Tree::kRoot), Tree::kRoot);
  EXPECT_EQ(tree.link_count(Tree::kRoot), 1u);
  EXPECT_EQ(tree.entry_count(Tree::kRoot), 0u);
}

TEST(TreeTest, SortsEntriesByUnsignedBytes) {
  Tree tree;
  for (const char* name : {"b", "a", "\xff", "B", "aa", "-"}) {
    ASSERT_TRUE(tree.Create(Tree::kRoot, name, File()).ok());
  }
  EXPECT_THAT(Names(tree, Tree::kRoot), testing::ElementsAre("-", "B", "a", "aa", "b", "\xff"));
}

TEST(TreeTest, RefusesNamesThatCannotBe) {
  Tree tree;
  const std::string with_nul("a\0b", 3);
  for (const std::string& name : {std::string(), std::string("."), std::string(".."),
                                  std::string("a/b"), with_nul, std::string(256, 'n')}) {
    EXPECT_EQ(tree.Create(Tree::kRoot, name, File()).status().code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
  EXPECT_EQ(tree.inode_limit(), 1u);
  EXPECT_TRUE(tree.Create(Tree::kRoot, std::string(255, 'n'), File()).ok());
}

TEST(TreeTest, RefusesATakenName) {
  Tree tree;
  ASSERT_TRUE(tree.Create(Tree::kRoot, "m", File()).ok());
  ASSERT_TRUE(tree.Create(Tree::kRoot, "z", File()).ok());
  EXPECT_EQ(tree.Create(Tree::kRoot, "m", File()).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(tree.Link(Tree::kRoot, "z", 1).code(), absl::StatusCode::kAlreadyExists);
}

TEST(TreeTest, CountsTheNamesOfAnInode) {
  Tree tree;
  const InodeIndex directory = *tree.Create(Tree::kRoot, "d", Directory());
  const InodeIndex file = *tree.Create(Tree::kRoot, "f", File());
  ASSERT_TRUE(tree.Link(directory, "g", file).ok());
  EXPECT_EQ(tree.link_count(file), 2u);
  EXPECT_EQ(tree.Find(directory, "g"), file);
  tree.Remove(Tree::kRoot, "f");
  EXPECT_EQ(tree.link_count(file), 1u);
  EXPECT_EQ(tree.Find(Tree::kRoot, "f"), std::nullopt);
}

TEST(TreeTest, RefusesHardLinksToDirectoriesAndNamesBelowFiles) {
  Tree tree;
  const InodeIndex directory = *tree.Create(Tree::kRoot, "d", Directory());
  const InodeIndex file = *tree.Create(Tree::kRoot, "f", File());
  EXPECT_EQ(tree.Link(Tree::kRoot, "e", directory).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tree.Create(file, "x", File()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tree.Find(file, "x"), std::nullopt);
}

TEST(TreeTest, RemovesAllBelowADirectory) {
  Tree tree;
  const InodeIndex directory = *tree.Create(Tree::kRoot, "d", Directory());
  const InodeIndex below = *tree.Create(directory, "e", Directory());
  const InodeIndex file = *tree.Create(below, "f", File());
  ASSERT_TRUE(tree.Link(Tree::kRoot, "kept", file).ok());
  tree.Remove(Tree::kRoot, "d");
  EXPECT_THAT(Names(tree, Tree::kRoot), testing::ElementsAre("kept"));
  EXPECT_EQ(tree.link_count(directory), 0u);
  EXPECT_EQ(tree.link_count(below), 0u);
  EXPECT_EQ(tree.link_count(file), 1u);
  tree.Remove(Tree::kRoot, "never there");
}

TEST(TreeTest, StandsADeepTree) {
  Tree tree;
  InodeIndex directory = Tree::kRoot;
  for (int i = 0; i < 200'000; ++i) directory = *tree.Create(directory, "d", Directory());
  EXPECT_THAT(tree.PathOf(directory, "end"), testing::EndsWith("/d/d/end"));
  tree.Remove(Tree::kRoot, "d");
  EXPECT_EQ(tree.link_count(directory), 0u);
}

TEST(TreeTest, CompactDropsWhatWasRemoved) {
  Tree tree;
  tree.Create(Tree::kRoot, "gone", Directory()).value();
  const InodeIndex directory = *tree.Create(Tree::kRoot, "d", Directory());
  tree.Create(*tree.Find(Tree::kRoot, "gone"), "below", File()).value();
  const InodeIndex file = *tree.Create(directory, "f", File());
  tree.inode(file).uid = 7;
  ASSERT_TRUE(tree.Link(Tree::kRoot, "link", file).ok());
  tree.Remove(Tree::kRoot, "gone");
  EXPECT_EQ(tree.removed_name_count(), 2u);
  EXPECT_EQ(tree.name_count(), 3u);

  tree.Compact();
  EXPECT_EQ(tree.inode_limit(), 3u);
  EXPECT_EQ(tree.removed_name_count(), 0u);
  EXPECT_EQ(tree.name_count(), 3u);
  EXPECT_THAT(Names(tree, Tree::kRoot), testing::ElementsAre("d", "link"));
  const InodeIndex moved = *tree.Find(Tree::kRoot, "d");
  EXPECT_EQ(tree.Find(moved, "f"), tree.Find(Tree::kRoot, "link"));
  EXPECT_EQ(tree.inode(*tree.Find(moved, "f")).uid, 7u);
  EXPECT_EQ(tree.link_count(*tree.Find(moved, "f")), 2u);
  EXPECT_EQ(tree.Parent(moved), Tree::kRoot);
  EXPECT_TRUE(tree.Create(moved, "new", File()).ok());
}

TEST(TreeTest, NamesAPath) {
  Tree tree;
  const InodeIndex usr = *tree.Create(Tree::kRoot, "usr", Directory());
  const InodeIndex bin = *tree.Create(usr, "bin", Directory());
  EXPECT_EQ(tree.PathOf(bin, "env"), "/usr/bin/env");
  EXPECT_EQ(tree.PathOf(Tree::kRoot, "etc"), "/etc");
}

}  // namespace
}  // namespace lamina::erofs
