// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/metadata_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "chunkstore/format.h"
#include "erofs/reader.h"
#include "fs/image/image.h"
#include "tests/engine/test_image.h"

namespace lamina::fs {
namespace {

class MetadataCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(image_.state() + "/blobs");
    absl::StatusOr<std::unique_ptr<chunkstore::BlobStore>> store =
        chunkstore::BlobStore::Open({.directory = image_.state() + "/blobs"});
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    const absl::StatusOr<Image> image = OpenImage(image_.reference(), oci::Platform::Host());
    ASSERT_TRUE(image.ok()) << image.status();
    for (const chunkstore::LayerDescriptor& layer : image->layers) {
      absl::StatusOr<std::shared_ptr<chunkstore::Blob>> blob = store_->Attach(layer, image->origin);
      ASSERT_TRUE(blob.ok()) << blob.status();
      blobs_.push_back(*std::move(blob));
    }
  }

  std::shared_ptr<const MergedMetadata> Get() {
    absl::StatusOr<std::shared_ptr<const MergedMetadata>> metadata =
        GetMergedMetadata(image_.state() + "/images", blobs_);
    EXPECT_TRUE(metadata.ok()) << metadata.status();
    return metadata.ok() ? *metadata : nullptr;
  }

  TestImage image_;
  std::unique_ptr<chunkstore::BlobStore> store_;
  std::vector<std::shared_ptr<chunkstore::Blob>> blobs_;
};

TEST_F(MetadataCacheTest, DeviceTableNamesTheLayers) {
  const auto metadata = Get();
  ASSERT_NE(metadata, nullptr);
  const absl::StatusOr<erofs::Reader> reader = erofs::Reader::Open(metadata->mapping.bytes());
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ(reader->devices().size(), 1u);
  EXPECT_EQ(reader->devices()[0].tag, blobs_[0]->descriptor().digest.Hex());
}

TEST_F(MetadataCacheTest, FileCanBeAPmemDevice) {
  EXPECT_EQ(Get()->mapping.bytes().size() % chunkstore::kFileAlignment, 0u);
}

TEST_F(MetadataCacheTest, SecondUseReadsTheFile) {
  const std::string path = Get()->path;
  const auto written = std::filesystem::last_write_time(path);
  EXPECT_EQ(Get()->path, path);
  EXPECT_EQ(std::filesystem::last_write_time(path), written);
}

TEST_F(MetadataCacheTest, DamagedFileIsBuiltAgain) {
  const std::string path = Get()->path;
  const std::string good = Slurp(path);
  for (const size_t position : {size_t{0}, size_t{1030}, good.size() - 1}) {
    std::string bad = good;
    bad[position] = static_cast<char>(bad[position] ^ 1);
    ASSERT_TRUE(WriteFileAtomically(path, bad).ok());
    Get();
    EXPECT_EQ(Slurp(path), good) << "byte " << position;
  }
}

TEST_F(MetadataCacheTest, TruncatedFileIsBuiltAgain) {
  const std::string path = Get()->path;
  const std::string good = Slurp(path);
  for (const off_t size : {off_t{0}, off_t{5}, static_cast<off_t>(good.size() - 4096)}) {
    ASSERT_EQ(::truncate(path.c_str(), size), 0);
    Get();
    EXPECT_EQ(Slurp(path), good) << size << " bytes";
  }
}

}  // namespace
}  // namespace lamina::fs
