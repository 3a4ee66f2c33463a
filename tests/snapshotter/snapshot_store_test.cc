// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/snapshot_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chunkstore/base/file.h"

namespace lamina::snapshotter {
namespace {

using ::testing::ElementsAre;

class SnapshotStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto directory = TemporaryDirectory::Create("/tmp", "lamina-snapshots-");
    ASSERT_TRUE(directory.ok()) << directory.status();
    directory_.emplace(*std::move(directory));
    Open();
  }
  void Open() {
    store_.reset();
    auto store = SnapshotStore::Open(directory_->path() + "/db");
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  absl::Status Create(const std::string& name, const std::string& parent = "",
                      Kind kind = Kind::kActive) {
    return store_
        ->Create({.name = name,
                  .id = store_->NewId(),
                  .parent = parent,
                  .kind = kind,
                  .labels = {{"label", name}}})
        .status();
  }
  absl::Status Commit(const std::string& key, const std::string& name) {
    return store_->Commit(key, name, {{"committed", "yes"}}, {123, 4}).status();
  }
  std::vector<std::string> ChainOf(const std::string& name) {
    std::vector<std::string> names;
    const auto chain = store_->Chain(name);
    EXPECT_TRUE(chain.ok()) << chain.status();
    for (const Snapshot& snapshot : *chain) names.push_back(snapshot.name);
    return names;
  }

  std::optional<TemporaryDirectory> directory_;
  std::unique_ptr<SnapshotStore> store_;
};

TEST_F(SnapshotStoreTest, RemembersEverything) {
  ASSERT_TRUE(Create("active").ok());
  ASSERT_TRUE(Commit("active", "base").ok());
  LazyLayer layer{.image = "docker://host/app@sha256:x", .marks = {.implied_root = true}};
  layer.layer = {.digest = Digest::Of(AsBytes("layer")),
                 .size = 7,
                 .section_table_offset = 3,
                 .section_table_digest = Digest::Of(AsBytes("table"))};
  ASSERT_TRUE(store_
                  ->Create({.name = "lazy",
                            .id = store_->NewId(),
                            .parent = "base",
                            .kind = Kind::kCommitted,
                            .layer = layer})
                  .ok());
  ASSERT_TRUE(Create("top", "lazy", Kind::kView).ok());
  const uint64_t last = store_->NewId();

  Open();
  EXPECT_THAT(ChainOf("top"), ElementsAre("top", "lazy", "base"));
  const auto base = store_->Get("base");
  ASSERT_TRUE(base.ok());
  EXPECT_EQ(base->kind, Kind::kCommitted);
  EXPECT_EQ(base->usage.bytes, 123);
  EXPECT_EQ(base->usage.inodes, 4);
  EXPECT_EQ(base->labels, (Labels{{"committed", "yes"}}));
  EXPECT_GT(base->created, 1'700'000'000'000'000'000);
  const auto lazy = store_->Get("lazy");
  ASSERT_TRUE(lazy.ok() && lazy->layer);
  EXPECT_EQ(lazy->layer->layer.digest, layer.layer.digest);
  EXPECT_EQ(lazy->layer->layer.size, 7u);
  EXPECT_EQ(lazy->layer->layer.section_table_offset, 3u);
  EXPECT_EQ(lazy->layer->layer.section_table_digest, layer.layer.section_table_digest);
  EXPECT_EQ(lazy->layer->image, layer.image);
  EXPECT_TRUE(lazy->layer->marks.implied_root);
  EXPECT_FALSE(lazy->layer->marks.implied_directories);
  EXPECT_LT(store_->Get("top")->id, last);
  EXPECT_GE(store_->NewId(), last);
}

TEST_F(SnapshotStoreTest, NamesAreTakenOnce) {
  ASSERT_TRUE(Create("a").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Create("a")));
  ASSERT_TRUE(Create("b").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Commit("a", "b")));
  EXPECT_TRUE(Commit("a", "c").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Get("a").status()));
  EXPECT_TRUE(Create("a").ok());
}

TEST_F(SnapshotStoreTest, ParentsAreCommittedAndStayAsLongAsTheyHaveChildren) {
  ASSERT_TRUE(Create("a").ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Create("b", "a")));
  EXPECT_TRUE(absl::IsNotFound(Create("b", "nothing")));
  ASSERT_TRUE(Commit("a", "base").ok());
  ASSERT_TRUE(Create("b", "base").ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Remove("base").status()));
  ASSERT_TRUE(Commit("b", "next").ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Remove("base").status()));
  EXPECT_EQ(store_->Children("base").size(), 1u);
  EXPECT_EQ(store_->Children("").size(), 1u);
  EXPECT_TRUE(store_->Remove("next").ok());
  EXPECT_TRUE(store_->Remove("base").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Remove("base").status()));
}

TEST_F(SnapshotStoreTest, OnlyWhatIsActiveIsCommitted) {
  ASSERT_TRUE(Create("a").ok());
  ASSERT_TRUE(Commit("a", "base").ok());
  ASSERT_TRUE(Create("view", "base", Kind::kView).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Commit("view", "x")));
  EXPECT_TRUE(absl::IsFailedPrecondition(Commit("base", "x")));
  EXPECT_TRUE(absl::IsNotFound(Commit("nothing", "x")));
}

TEST_F(SnapshotStoreTest, LabelsAreAllThatCanBeChanged) {
  ASSERT_TRUE(Create("a").ok());
  auto updated = store_->Update("a", {{"x", "1"}, {"y", "2"}}, {});
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ(updated->labels, (Labels{{"x", "1"}, {"y", "2"}}));
  updated = store_->Update("a", {{"x", "3"}, {"z", "4"}}, {"labels.x", "labels.y"});
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ(updated->labels, (Labels{{"x", "3"}}));
  EXPECT_GT(updated->updated, updated->created);
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Update("a", {}, {"parent"}).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Update("b", {}, {}).status()));
  EXPECT_EQ(store_->Get("a")->labels, (Labels{{"x", "3"}}));
}

TEST_F(SnapshotStoreTest, OneProcessHasIt) {
  EXPECT_TRUE(absl::IsUnavailable(SnapshotStore::Open(directory_->path() + "/db").status()));
}

}  // namespace
}  // namespace lamina::snapshotter
