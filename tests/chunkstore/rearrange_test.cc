// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/rearrange.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "chunkstore/base/file.h"
#include "chunkstore/blob_writer.h"
#include "tests/chunkstore/blob_testing.h"

namespace lamina::chunkstore {
namespace {

using testing::ElementsAre;

UniqueFd MemoryFile() { return UniqueFd(::memfd_create("blob", MFD_CLOEXEC)); }

class StringOutput : public BlobOutput {
 public:
  explicit StringOutput(std::string* object) : object_(object) {}
  absl::Status Append(std::span<const std::byte> bytes) override {
    object_->append(AsText(bytes));
    return absl::OkStatus();
  }
  absl::Status Finish(const Digest& digest) override {
    EXPECT_EQ(digest, Digest::Of(AsBytes(*object_)));
    return absl::OkStatus();
  }

 private:
  std::string* const object_;
};

// Frames 0 (two small chunks), 1 to 3 (one chunk), 4 (one small chunk).
class RearrangeTest : public testing::Test {
 protected:
  const std::vector<std::string> files_ = {TextBytes(100'000, 1), TextBytes(120'000, 2),
                                           RandomBytes(700'000, 3), TextBytes(5'000, 4)};

  TestBlob Build(const std::vector<uint32_t>& first, int jobs = 1,
                 std::vector<MovedBlocks>* moves = nullptr) {
    UniqueFd file = MemoryFile();
    const int fd = ::dup(file.get());
    auto writer = BlobWriter::Create(std::move(file), {.jobs = jobs});
    EXPECT_TRUE(writer.ok()) << writer.status();
    TestBlob blob;
    for (const std::string& content : files_) {
      EXPECT_TRUE((*writer)->BeginFile(content.size()).ok());
      EXPECT_TRUE((*writer)->Append(AsBytes(content)).ok());
      blob.placements.push_back((*writer)->EndFile().value());
    }
    const UniqueFd old(fd);
    std::string object;
    const auto moved = (*writer)->Rearrange(old, std::make_unique<StringOutput>(&object), first);
    EXPECT_TRUE(moved.ok()) << moved.status();
    if (moves != nullptr) *moves = *moved;
    const auto info = (*writer)->Finish(AsBytes("metadata"));
    EXPECT_TRUE(info.ok()) << info.status();
    blob.info = *info;
    blob.object = std::move(object);
    return blob;
  }
};

TEST_F(RearrangeTest, NamedFramesComeFirstAndContentStays) {
  std::vector<MovedBlocks> moves;
  const TestBlob blob = Build({4, 2}, 1, &moves);
  OpenBlob open;
  const absl::Status status = open.Open(blob.object, blob.descriptor());  // checks all of it
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(blob.info.hot_frames, 4);
  EXPECT_THAT(
      moves, ElementsAre(MovedBlocks{0, 55, 173}, MovedBlocks{55, 171, 2}, MovedBlocks{226, 2, 0}));
  for (size_t i = 0; i < files_.size(); ++i) {
    std::vector<Placement> moved = blob.placements[i];
    for (Placement& placement : moved) {
      for (const MovedBlocks& move : moves) {
        if (placement.block >= move.from && placement.block < move.from + move.blocks) {
          placement.block += move.to - move.from;
          break;
        }
      }
    }
    EXPECT_TRUE(open.ReadFile(moved, files_[i].size()) == files_[i]) << i;
  }
}

TEST_F(RearrangeTest, IsAPureFunctionOfContentAndOrder) {
  const TestBlob one = Build({4, 2}, 1);
  const TestBlob three = Build({4, 2, 4, 1, 99}, 3);  // named twice, or not there: no difference
  EXPECT_EQ(one.info.digest.ToString(), three.info.digest.ToString());
  EXPECT_NE(one.info.digest.ToString(), Build({0}).info.digest.ToString());
}

TEST_F(RearrangeTest, TheOldOrderIsTheBlobAsItWas) {
  EXPECT_EQ(Build({0, 1, 2}).info.digest.ToString(), BuildBlob(files_).info.digest.ToString());
  EXPECT_EQ(Build({}).info.digest.ToString(), BuildBlob(files_).info.digest.ToString());
}

TEST(ArrangeTest, EmptyBlobStaysEmpty) {
  const Arrangement arrangement = Arrange({}, {}, std::vector<uint32_t>{0, 1});
  EXPECT_TRUE(arrangement.frames.empty());
  EXPECT_TRUE(arrangement.moves.empty());
}

}  // namespace
}  // namespace lamina::chunkstore
