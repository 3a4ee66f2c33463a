// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/mount_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace lamina::fs {
namespace {

MountRecord Sample() {
  MountRecord record;
  record.phase = MountRecord::Phase::kMounted;
  record.description = {.id = "17",
                        .image = "oci:/srv/images:tag",
                        .manifest_digest = "sha256:" + std::string(64, '1'),
                        .layer_images = {{"oci:/srv/images:tools", "sha256:1", 1}},
                        .target = "/mnt/\xff not UTF-8",
                        .transport = Transport::kFuse,
                        .loop = true,
                        .writable = true,
                        .upper = "/srv/upper/upper",
                        .lower_uppers = {"/state/mounts/copy-1/upper"},
                        .reason = "asked for"};
  record.writable_dir = "/srv/upper";
  record.token = "token";
  record.prefetch = {.enabled = false, .fill = true, .bytes_per_second = 123};
  chunkstore::LayerDescriptor layer;
  layer.digest.bytes.fill(7);
  layer.size = UINT64_MAX;
  layer.section_table_offset = 12345;
  layer.section_table_digest.bytes.fill(8);
  record.layers = {layer, layer};
  record.served_image = 12;
  record.metadata_inode = UINT64_MAX;
  record.kernel_id = 99;
  record.metadata = "/state/images/x/metadata";
  record.fuse_state = "1 2 3 ff";
  return record;
}

TEST(MountRecord, IsReadAsItWasWritten) {
  const MountRecord record = Sample();
  const absl::StatusOr<MountRecord> read = ParseMountRecord(SerializeMountRecord(record));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->phase, record.phase);
  EXPECT_EQ(read->description.id, record.description.id);
  EXPECT_EQ(read->description.image, record.description.image);
  EXPECT_EQ(read->description.manifest_digest, record.description.manifest_digest);
  EXPECT_EQ(read->description.target, record.description.target);
  EXPECT_EQ(read->description.transport, record.description.transport);
  EXPECT_EQ(read->description.loop, record.description.loop);
  EXPECT_EQ(read->description.writable, record.description.writable);
  EXPECT_EQ(read->description.reason, record.description.reason);
  EXPECT_EQ(read->description.layer_images, record.description.layer_images);
  EXPECT_EQ(read->description.upper, record.description.upper);
  EXPECT_EQ(read->description.lower_uppers, record.description.lower_uppers);
  EXPECT_EQ(read->writable_dir, record.writable_dir);
  EXPECT_EQ(read->token, record.token);
  EXPECT_EQ(read->prefetch.enabled, record.prefetch.enabled);
  EXPECT_EQ(read->prefetch.fill, record.prefetch.fill);
  EXPECT_EQ(read->prefetch.bytes_per_second, record.prefetch.bytes_per_second);
  EXPECT_EQ(read->layers, record.layers);
  EXPECT_EQ(read->served_image, record.served_image);
  EXPECT_EQ(read->metadata_inode, record.metadata_inode);
  EXPECT_EQ(read->kernel_id, record.kernel_id);
  EXPECT_EQ(read->metadata, record.metadata);
  EXPECT_EQ(read->fuse_state, record.fuse_state);
}

// An upgrade must not lose mounts because their records lack what the old version did not know.
TEST(MountRecord, FieldsThatCameLaterMayBeMissing) {
  const std::string text = SerializeMountRecord(Sample());
  nlohmann::json object = nlohmann::json::from_cbor(text);
  for (const char* field : {"served_image", "metadata_inode", "registry", "prefetch"}) {
    EXPECT_EQ(object.erase(field), 1u) << field;
  }
  const std::vector<uint8_t> older = nlohmann::json::to_cbor(object);
  const auto read = ParseMountRecord(std::string(older.begin(), older.end()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->served_image, 0u);
  EXPECT_EQ(read->layers, Sample().layers);
}

TEST(MountRecord, EachLayerIsOfAnImage) {
  MountRecord record = Sample();
  EXPECT_EQ(ImagesOfLayers(record),
            (std::vector<std::string>{"oci:/srv/images:tag", "oci:/srv/images:tools"}));
  record.description.layer_images[0].layers = 7;  // more than there are
  EXPECT_EQ(ImagesOfLayers(record),
            (std::vector<std::string>{"oci:/srv/images:tools", "oci:/srv/images:tools"}));
}

TEST(MountRecord, EveryPhaseIsKept) {
  for (const auto phase : {MountRecord::Phase::kMounting, MountRecord::Phase::kMounted,
                           MountRecord::Phase::kDetached}) {
    MountRecord record = Sample();
    record.phase = phase;
    EXPECT_EQ(ParseMountRecord(SerializeMountRecord(record))->phase, phase);
  }
}

TEST(MountRecord, DamageIsNoticedOrHarmless) {
  const std::string whole = SerializeMountRecord(Sample());
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_TRUE(absl::IsDataLoss(ParseMountRecord(whole.substr(0, length)).status())) << length;
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x55);
    const absl::Status status = ParseMountRecord(damaged).status();
    EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << i << ": " << status;
  }
}

}  // namespace
}  // namespace lamina::fs
