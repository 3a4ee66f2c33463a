// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/snapshotter.h"

#include <absl/strings/str_join.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "chunkstore/base/file.h"
#include "chunkstore/base/remove_tree.h"
#include "fs/mount/mount.h"
#include "tests/engine/test_image.h"

namespace lamina::snapshotter {
namespace {

using fs::Slurp;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Takes everything for a layer of the test image, as long as it is told to; for the name space
// "untrusted" it is another one, which cannot be mounted.
class FixedFinder : public LayerFinder {
 public:
  FixedFinder(fs::Engine& engine, std::string image, const bool& finds)
      : engine_(engine), image_(std::move(image)), finds_(finds) {}
  absl::StatusOr<std::optional<LazyLayer>> Find(const LayerQuery& query) override {
    if (!finds_) return std::nullopt;
    if (query.key.starts_with("untrusted/")) {
      return LazyLayer{.layer = {.digest = Digest::Of(AsBytes("other"))}, .image = image_};
    }
    ASSIGN_OR_RETURN(const fs::Image image, engine_.OpenImage(image_, {}));
    const auto attached = engine_.AttachLayers(image, /*on_others=*/false);
    RETURN_IF_ERROR(attached[0].status());
    return LazyLayer{.layer = image.layers[0], .image = image_, .marks = attached[0]->marks};
  }

 private:
  fs::Engine& engine_;
  const std::string image_;
  const bool& finds_;
};

class SnapshotterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "mounting needs root";
    Open();
  }
  void TearDown() override {
    ::umount2(image_.mountpoint().c_str(), MNT_DETACH);
    snapshotter_.reset();
  }
  void Open() {
    snapshotter_.reset();
    engine_.reset();
    auto engine = fs::Engine::Open({.state = image_.state()});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    auto snapshotter = Snapshotter::Open(
        {.state = image_.state(),
         .layer_images = {"oci:" + image_.layout() + "/"},
         .idle = std::chrono::milliseconds(50)},
        *engine_, std::make_unique<FixedFinder>(*engine_, image_.reference(), finds_));
    ASSERT_TRUE(snapshotter.ok()) << snapshotter.status();
    snapshotter_ = *std::move(snapshotter);
  }
  // As containerd does, and gives the name of the snapshot.
  std::string PullLayer(const std::string& reference, const std::string& parent = "") {
    const Labels labels{{kReferenceLabel, reference}};
    const auto mounts = snapshotter_->Create(Kind::kActive, "extract " + reference, parent, labels);
    EXPECT_TRUE(absl::IsAlreadyExists(mounts.status())) << mounts.status();
    for (const Snapshot& snapshot : snapshotter_->List()) {
      if (snapshot.kind == Kind::kCommitted && snapshot.parent == parent &&
          snapshot.labels == labels) {
        return snapshot.name;
      }
    }
    ADD_FAILURE() << "no snapshot of " << reference;
    return "";
  }
  // Mounts a snapshot at the mount point, until the next one.
  void Mount(const absl::StatusOr<std::vector<MountSpec>>& mounts) {
    ASSERT_TRUE(mounts.ok()) << mounts.status();
    ASSERT_EQ(mounts->size(), 1u);
    const MountSpec& spec = mounts->front();
    ::umount2(image_.mountpoint().c_str(), 0);
    const bool bind = spec.type == "bind";
    const std::string data = bind ? "" : absl::StrJoin(spec.options, ",");
    ASSERT_EQ(::mount(spec.source.c_str(), image_.mountpoint().c_str(), spec.type.c_str(),
                      bind ? MS_BIND : 0, data.c_str()),
              0)
        << spec.type << " " << data << ": " << strerror(errno);
  }
  std::string Read(const std::string& name) { return Slurp(image_.mountpoint() + "/" + name); }
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(image_.mountpoint() + "/" + name) << text;
  }
  size_t MountedLayers() {
    const std::string layers = std::filesystem::canonical(image_.state()).string() + "/snapshots/L";
    const auto mounts = fs::ReadMountInfo();
    EXPECT_TRUE(mounts.ok());
    return static_cast<size_t>(std::ranges::count_if(
        *mounts, [&](const fs::MountInfo& info) { return info.target.starts_with(layers); }));
  }

  fs::TestImage image_;
  bool finds_ = true;
  std::unique_ptr<fs::Engine> engine_;
  std::unique_ptr<Snapshotter> snapshotter_;
};

TEST_F(SnapshotterTest, ConvertedLayerIsCommittedInsteadOfUnpacked) {
  const std::string base = PullLayer("sha256:base");
  EXPECT_EQ(PullLayer("sha256:base"), base);
  EXPECT_EQ(snapshotter_->List().size(), 1u);
  EXPECT_EQ(MountedLayers(), 0u);

  Mount(snapshotter_->Create(Kind::kView, "view", base, {}));
  EXPECT_EQ(Read("hello.txt"), image_.hello());
  Mount(snapshotter_->Create(Kind::kActive, "active", base, {}));
  EXPECT_EQ(Read("data.bin"), image_.data());
  Write("hello.txt", "changed");
  EXPECT_EQ(Read("hello.txt"), "changed");
  EXPECT_EQ(MountedLayers(), 1u);
  EXPECT_EQ(snapshotter_->GetUsage(base)->bytes, 0);
  EXPECT_GT(snapshotter_->GetUsage("active")->bytes, 0);
}

TEST_F(SnapshotterTest, NameSpacesGetTheLayerThatWasFoundForThem) {
  const auto prepare = [&](const std::string& name_space) {
    return snapshotter_
        ->Create(Kind::kActive, name_space + "/7/extract", "", {{kReferenceLabel, "sha256:base"}})
        .status();
  };
  // As containerd does, which does not say for whom it asks.
  const auto find = [&]() -> std::string {
    const auto taken = snapshotter_->ListTaken([](const Snapshot&) { return true; });
    return taken.size() == 1 ? taken[0].name : "";
  };
  ASSERT_TRUE(absl::IsAlreadyExists(prepare("untrusted")));
  const std::string other = find();
  ASSERT_TRUE(absl::IsAlreadyExists(prepare("one")));
  const std::string base = find();
  EXPECT_NE(base, other);
  ASSERT_TRUE(absl::IsAlreadyExists(prepare("two")));
  std::atomic<bool> answered = false;
  std::thread third([&] {
    EXPECT_TRUE(absl::IsAlreadyExists(prepare("untrusted")));
    answered = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(answered) << "before the one before has found its snapshot";
  EXPECT_EQ(find(), base);
  third.join();
  EXPECT_EQ(find(), other);
  EXPECT_EQ(snapshotter_->List().size(), 2u);
  Mount(snapshotter_->Create(Kind::kView, "view", base, {}));
  EXPECT_EQ(Read("hello.txt"), image_.hello());

  ASSERT_TRUE(snapshotter_->Remove(other).ok());
  EXPECT_EQ(find(), "");
  // One for which there is none unpacks the layer, whatever others have.
  finds_ = false;
  EXPECT_TRUE(prepare("three").ok());
}

TEST_F(SnapshotterTest, OrdinaryLayersStackOnConvertedOnesAndTheReverse) {
  const std::string base = PullLayer("sha256:base");
  finds_ = false;
  Mount(snapshotter_->Create(Kind::kActive, "extract", base, {{kReferenceLabel, "sha256:next"}}));
  Write("added", "ordinary");
  std::filesystem::remove(image_.mountpoint() + "/data.bin");
  ASSERT_TRUE(snapshotter_->Commit("next", "extract", {}).ok());
  finds_ = true;
  const std::string top = PullLayer("sha256:top", "next");

  Mount(snapshotter_->Create(Kind::kView, "below", "next", {}));
  EXPECT_EQ(Read("added"), "ordinary");
  EXPECT_FALSE(std::filesystem::exists(image_.mountpoint() + "/data.bin"));
  Mount(snapshotter_->Create(Kind::kActive, "active", top, {}));
  EXPECT_EQ(Read("added"), "ordinary");
  EXPECT_EQ(Read("data.bin"), image_.data());  // from the uppermost layer again
}

TEST_F(SnapshotterTest, ALayerMayBeThereTwice) {
  const std::string base = PullLayer("sha256:base");
  const std::string top = PullLayer("sha256:top", PullLayer("sha256:middle", base));
  Mount(snapshotter_->Create(Kind::kActive, "active", top, {}));
  EXPECT_EQ(Read("hello.txt"), image_.hello());
  EXPECT_EQ(MountedLayers(), 1u);
}

TEST_F(SnapshotterTest, LayersOfNoSnapshotAreUnmountedAndComeBack) {
  const std::string base = PullLayer("sha256:base");
  ASSERT_TRUE(snapshotter_->Create(Kind::kActive, "active", base, {}).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(MountedLayers(), 1u);
  ASSERT_TRUE(snapshotter_->Remove("active").ok());
  for (int i = 0; i < 200 && MountedLayers() > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(MountedLayers(), 0u);
  Mount(snapshotter_->Create(Kind::kActive, "again", base, {}));
  EXPECT_EQ(Read("hello.txt"), image_.hello());
}

TEST_F(SnapshotterTest, LayersCanBeUsedAgainWhileTheyAreUnmounted) {
  const std::string base = PullLayer("sha256:base");
  for (int turn = 0; turn < 60; ++turn) {
    Mount(snapshotter_->Create(Kind::kActive, "active", base, {}));
    ASSERT_EQ(Read("hello.txt"), image_.hello()) << turn;
    ASSERT_EQ(::umount2(image_.mountpoint().c_str(), 0), 0);
    ASSERT_TRUE(snapshotter_->Remove("active").ok());
    // About when they have been idle for long enough.
    std::this_thread::sleep_for(std::chrono::microseconds(48'000 + 100 * turn));
  }
}

TEST_F(SnapshotterTest, TheCacheKeepsWhatIsMounted) {
  const auto metadata_files = [this] {
    size_t count = 0;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(image_.state() + "/images")) {
      if (entry.path().filename() == "metadata") ++count;
    }
    return count;
  };
  fs::ImageCache& images = engine_->images();
  const std::string base = PullLayer("sha256:base");
  EXPECT_EQ(metadata_files(), 0u) << "that of the lowest layer is made when it is mounted";
  ASSERT_TRUE(images.Remove(image_.reference()).ok());
  ASSERT_TRUE(snapshotter_->Create(Kind::kActive, "active", base, {}).ok());
  const size_t mounted = metadata_files();
  EXPECT_GT(mounted, 0u);
  ASSERT_TRUE(images.Clean(0).ok());
  EXPECT_EQ(metadata_files(), mounted) << "of layers that no image has";

  const absl::StatusOr<fs::Image> image = engine_->OpenImage(image_.reference(), {});
  ASSERT_TRUE(image.ok()) << image.status();
  ASSERT_TRUE(engine_->AttachLayers(*image, /*on_others=*/false)[0].ok());
  EXPECT_TRUE(images.Report().images.at(0).mounted);
  EXPECT_TRUE(absl::IsFailedPrecondition(images.Remove(image_.reference()).status()));
  Open();
  EXPECT_FALSE(engine_->images().Report().images.at(0).mounted)
      << "the engine took its mounts along";
  ASSERT_TRUE(snapshotter_->Mounts("active").ok());
  EXPECT_TRUE(engine_->images().Report().images.at(0).mounted);
  ASSERT_TRUE(snapshotter_->Remove("active").ok());
  absl::Status removed = absl::UnavailableError("");
  for (int i = 0; i < 200 && !removed.ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    removed = engine_->images().Remove(image_.reference()).status();
  }
  EXPECT_TRUE(removed.ok()) << removed;
}

TEST_F(SnapshotterTest, SnapshotsOfAnEarlierProcessAreThere) {
  const std::string base = PullLayer("sha256:base");
  Mount(snapshotter_->Create(Kind::kActive, "active", base, {}));
  Write("written", "kept");
  ASSERT_EQ(::umount2(image_.mountpoint().c_str(), 0), 0);
  std::filesystem::create_directories(image_.state() + "/snapshots/77/fs");
  std::filesystem::create_directories(image_.state() + "/snapshots/removed-5");
  Open();  // its layers were unmounted with the engine
  Mount(snapshotter_->Mounts("active"));
  EXPECT_EQ(Read("written"), "kept");
  EXPECT_EQ(Read("hello.txt"), image_.hello());
  snapshotter_->Cleanup();
  EXPECT_FALSE(std::filesystem::exists(image_.state() + "/snapshots/77"));
  EXPECT_FALSE(std::filesystem::exists(image_.state() + "/snapshots/removed-5"));
}

TEST_F(SnapshotterTest, RemovedSnapshotsLeaveNothing) {
  ASSERT_TRUE(snapshotter_->Create(Kind::kActive, "a", "", {}).ok());
  ASSERT_TRUE(snapshotter_->Remove("a").ok());
  snapshotter_->Cleanup();
  for (const auto& entry : std::filesystem::directory_iterator(image_.state() + "/snapshots")) {
    EXPECT_EQ(entry.path().filename(), "db");
  }
}

// One descriptor, and as much memory, for each level would be too many.
TEST_F(SnapshotterTest, RemovedSnapshotsMayBeDeep) {
  ASSERT_TRUE(snapshotter_->Create(Kind::kActive, "a", "", {}).ok());
  const std::string files = image_.state() + "/snapshots/1/fs";
  UniqueFd at = OpenFile(files, O_RDONLY | O_DIRECTORY).value();
  for (int level = 0; level < 2000; ++level) {
    ASSERT_EQ(::mkdirat(at.get(), "deep", 0700), 0);
    at = UniqueFd(::openat(at.get(), "deep", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    ASSERT_TRUE(at.valid());
  }
  at.Reset();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{.rlim_cur = 512, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_TRUE(snapshotter_->Remove("a").ok());
  snapshotter_->Cleanup();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  for (const auto& entry : std::filesystem::directory_iterator(image_.state() + "/snapshots")) {
    EXPECT_EQ(entry.path().filename(), "db");
    lamina::RemoveTree(entry.path()).IgnoreError();  // which gtest's fixture could not
  }
}

TEST_F(SnapshotterTest, WhatIsMountedForLayersAndServedByNobodyIsUnmounted) {
  const std::string base = PullLayer("sha256:base");
  Mount(snapshotter_->Create(Kind::kActive, "active", base, {}));
  ASSERT_EQ(::umount2(image_.mountpoint().c_str(), 0), 0);
  std::string layer;
  for (const auto& entry : std::filesystem::directory_iterator(image_.state() + "/snapshots")) {
    if (entry.path().filename().string().starts_with("L")) layer = entry.path();
  }
  ASSERT_FALSE(layer.empty());
  snapshotter_.reset();
  engine_.reset();  // unmounts what it knows of
  std::filesystem::create_directory(layer);
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(::mount("none", layer.c_str(), "tmpfs", 0, nullptr), 0);
  }
  Open();
  EXPECT_EQ(MountedLayers(), 0u);
  Mount(snapshotter_->Mounts("active"));
  EXPECT_EQ(Read("hello.txt"), image_.hello());
}

TEST_F(SnapshotterTest, LayerImagesAreWhereTheyMayBeWhateverTheirPathSays) {
  const std::string base = PullLayer("sha256:base");
  const auto create = [&](const std::string& reference) {
    return snapshotter_
        ->Create(Kind::kActive, "a", base, {{"containerd.io/snapshot/lamina.layers", reference}})
        .status();
  };
  for (const char* path : {"/..:x", "/..", "/../image:test", "/a/../..:x", "/./..:x"}) {
    const absl::Status refused = create("oci:" + image_.layout() + path);
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << path << ": " << refused;
  }
  const absl::Status allowed = create("oci:" + image_.layout() + "/a/../b:x");
  EXPECT_TRUE(absl::IsNotFound(allowed)) << allowed;
}

TEST_F(SnapshotterTest, StateDirectoriesThatOverlayfsWouldTakeApartAreRefused) {
  for (const char* name : {"a,b", "a:b", "a\\b"}) {
    const std::string state = image_.state() + "/" + name;
    std::filesystem::create_directory(state);
    const absl::Status refused = Snapshotter::Open({.state = state}, *engine_, nullptr).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(state));
  }
}

TEST_F(SnapshotterTest, CommittedSnapshotsAreNotMounted) {
  ASSERT_TRUE(snapshotter_->Create(Kind::kActive, "a", "", {}).ok());
  ASSERT_TRUE(snapshotter_->Commit("base", "a", {}).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(snapshotter_->Mounts("base").status()));
  EXPECT_TRUE(absl::IsNotFound(snapshotter_->Mounts("a").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(snapshotter_->Create(Kind::kView, "", "base", {}).status()));
}

}  // namespace
}  // namespace lamina::snapshotter
