// SPDX-License-Identifier: Apache-2.0
//
// Images of several places share blobs of a node: what a bad one names, lacks or has wrong is no harm
// to a good one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "chunkstore/oci_layout_origin.h"
#include "tests/chunkstore/store_testing.h"

namespace lamina::chunkstore {
namespace {

using testing::HasSubstr;

class SeveralOriginsTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    std::filesystem::create_directories(bad_layout() + "/blobs/sha256");
    std::vector<std::string> files;
    for (int i = 0; i < 12; ++i) files.push_back(RandomBytes(kFrameSize, i));
    blob_ = AddBlob(files);
    content_ = AddressSpace(blob_);
  }

  std::string bad_layout() const { return root() + "/bad"; }
  // An origin that has nothing, until something is put there.
  std::shared_ptr<ObservedOrigin> NewBadOrigin() const {
    auto origin = OpenOciLayoutOrigin(bad_layout());
    EXPECT_TRUE(origin.ok()) << origin.status();
    return std::make_shared<ObservedOrigin>(*std::move(origin));
  }
  void PutIntoBad(const Digest& digest, const std::string& object) const {
    std::ofstream(bad_layout() + "/blobs/sha256/" + digest.Hex(), std::ios::binary) << object;
  }
  // The blob with every frame wrong, and its tables right.
  void PutWrongFrames() const {
    std::string object = blob_.object;
    for (uint64_t i = 0; i < blob_.info.section_table_offset - (64 << 10); i += 1000)
      object[i] ^= 1;
    PutIntoBad(blob_.info.digest, object);
  }
  // Another blob, sound in itself, in the place of the good one: with its own section table.
  LayerDescriptor PutImpostor() const {
    const TestBlob other = BuildBlob({RandomBytes(kFrameSize, 77)});
    PutIntoBad(blob_.info.digest, other.object);
    LayerDescriptor descriptor = other.descriptor();
    descriptor.digest = blob_.info.digest;
    return descriptor;
  }

  using StoreTest::Attach;
  std::shared_ptr<Blob> Attach(BlobStore& store, std::shared_ptr<Origin> origin) const {
    return Attach(store, blob_.descriptor(), std::move(origin));
  }

  TestBlob blob_;
  std::string content_;
};

TEST_F(SeveralOriginsTest, OneDigestWithTwoSectionTablesIsTwoBlobs) {
  const LayerDescriptor impostor = PutImpostor();
  for (const bool impostor_first : {false, true}) {
    for (const bool in_memory : {false, true}) {
      const auto store = OpenStore(BlobStore::Options{.in_memory = in_memory});
      std::shared_ptr<Blob> bad;
      if (impostor_first) bad = Attach(*store, impostor, NewBadOrigin());
      const auto good = Attach(*store, NewOrigin());
      if (!impostor_first) bad = Attach(*store, impostor, NewBadOrigin());
      EXPECT_TRUE(ReadBlob(*good).value() == content_);
      EXPECT_TRUE(ReadBlob(*bad).value() == RandomBytes(kFrameSize, 77));
      EXPECT_EQ(store->GetUsage().blobs.size(), 2u);
      for (const auto& blob : store->GetUsage().blobs) EXPECT_EQ(blob.digest, blob_.info.digest);
    }
  }
  // Both are on the disk now, and what was read of one is not taken for the other.
  const auto store = OpenStore();
  EXPECT_TRUE(ReadBlob(*Attach(*store, nullptr)).value() == content_);
  EXPECT_EQ(store->GetUsage().blobs.size(), 2u);
}

TEST_F(SeveralOriginsTest, AnInventedSectionTableLeavesTheGoodBlobAlone) {
  LayerDescriptor invented = blob_.descriptor();
  invented.section_table_digest = Digest::Of(AsBytes("invented"));
  const auto store = OpenStore();
  const auto good = Attach(*store, NewOrigin());
  EXPECT_TRUE(ReadBlob(*good, 0, 1).ok());
  EXPECT_EQ(store->Attach(invented, NewBadOrigin()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store->Attach(invented, NewOrigin()).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(ReadBlob(*good).value() == content_);
}

TEST_F(SeveralOriginsTest, AnOriginThatDoesNotAnswerHoldsUpNobodyElse) {
  const auto store = OpenStore();
  PutIntoBad(blob_.info.digest, blob_.object);
  const auto slow = NewBadOrigin();
  slow->Hold();
  std::shared_ptr<Blob> waited;
  std::thread waiting([&] { waited = Attach(*store, slow); });
  slow->AwaitHeld(1);
  const auto good = Attach(*store, NewOrigin());
  EXPECT_TRUE(ReadBlob(*good).value() == content_);
  slow->Release();
  waiting.join();
  EXPECT_EQ(waited.get(), good.get());
}

TEST_F(SeveralOriginsTest, AnOriginThatHangsHoldsUpReadsOfNothingElse) {
  const auto store = OpenStore(nullptr, /*threads=*/2);
  PutIntoBad(blob_.info.digest, blob_.object);
  const auto slow = NewBadOrigin();
  const auto stuck = Attach(*store, slow);
  const TestBlob other = AddBlob({RandomBytes(kFrameSize, 50), RandomBytes(kFrameSize, 51),
                                  RandomBytes(kFrameSize, 52), RandomBytes(kFrameSize, 53)});
  const auto good = Attach(*store, other.descriptor(), NewOrigin());
  slow->Hold();
  std::vector<FetchResult> waiting(12);
  for (uint32_t i = 0; i < 12; ++i) {
    stuck->Fetch(i * kFrameSize, 1, Priority::kForeground, nullptr, waiting[i].Callback());
  }
  slow->AwaitHeld(2);
  FetchResult read;
  FetchResult bulk;
  good->Fetch(0, kFrameSize, Priority::kForeground, nullptr, read.Callback());
  good->FetchBulk(1, 4, Priority::kBulk, {}, nullptr, {}, bulk.Callback());
  for (int i = 0; i < 1000 && !(read.called() && bulk.called()); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(read.called());
  EXPECT_TRUE(bulk.called());
  for (const FetchResult& result : waiting) EXPECT_FALSE(result.called());
  slow->Release();
  for (FetchResult& result : waiting) EXPECT_TRUE(result.Wait().ok());
  EXPECT_TRUE(read.Wait().ok());
  EXPECT_TRUE(bulk.Wait().ok());
}

TEST_F(SeveralOriginsTest, ManyWhoAttachFromOneOriginReadTheTablesOnce) {
  const auto store = OpenStore();
  const auto origin = NewOrigin();
  origin->Hold();
  std::vector<std::jthread> threads;
  std::vector<std::shared_ptr<Blob>> blobs(8);
  for (auto& blob : blobs) threads.emplace_back([&] { blob = Attach(*store, origin); });
  origin->AwaitHeld(1);
  origin->Release();
  threads.clear();
  for (const auto& blob : blobs) EXPECT_EQ(blob, blobs[0]);
  EXPECT_EQ(origin->opened(), 1);
}

TEST_F(SeveralOriginsTest, AnOriginThatHasNothingIsPassedOver) {
  for (const bool bad_first : {false, true}) {
    const std::unique_ptr<BlobStore> store = OpenStore(BlobStore::Options{.in_memory = true});
    const auto good = NewOrigin();
    const auto bad = NewBadOrigin();
    PutIntoBad(blob_.info.digest, blob_.object);
    const auto attached = Attach(*store, bad_first ? bad : good);
    Attach(*store, bad_first ? good : bad);
    std::filesystem::remove(bad_layout() + "/blobs/sha256/" + blob_.info.digest.Hex());
    const int before = bad->opened();
    EXPECT_TRUE(ReadLikeAMount(*attached, 0, content_.size()).value() == content_);
    // After a failure it is the last to be asked.
    EXPECT_LE(bad->opened() - before, bad_first ? 4 : 0);
  }
}

TEST_F(SeveralOriginsTest, WrongBytesOfOneOriginComeFromTheOther) {
  PutWrongFrames();
  for (const bool bad_first : {false, true}) {
    std::filesystem::remove_all(state());
    const auto store = OpenStore();
    const auto attached = Attach(*store, bad_first ? NewBadOrigin() : NewOrigin());
    Attach(*store, bad_first ? NewOrigin() : NewBadOrigin());
    EXPECT_TRUE(ReadBlob(*attached).value() == content_);
  }
}

TEST_F(SeveralOriginsTest, AnOriginOfWrongBytesIsNotAskedAgainForTheRestOfThem) {
  PutWrongFrames();
  const auto store = OpenStore(nullptr, /*threads=*/1);
  const auto bad = NewBadOrigin();
  const auto attached = Attach(*store, bad);
  Attach(*store, NewOrigin());
  bad->ForgetRanges();
  EXPECT_TRUE(ReadBlob(*attached).value() == content_);
  EXPECT_EQ(bad->ranges().size(), 1u);
}

TEST_F(SeveralOriginsTest, AnObjectThatWasRepairedIsReadByWhoHadItOpen) {
  const std::string path = bad_layout() + "/blobs/sha256/" + blob_.info.digest.Hex();
  for (const bool bulk : {false, true}) {
    std::filesystem::remove_all(state());
    PutWrongFrames();
    const auto store = OpenStore();
    const auto attached = Attach(*store, NewBadOrigin());
    EXPECT_TRUE(absl::IsDataLoss(ReadBlob(*attached).status()));
    std::ofstream(path + ".new", std::ios::binary) << blob_.object;
    std::filesystem::rename(path + ".new", path);
    if (bulk) {
      FetchResult result;
      attached->FetchBulk(0, attached->frames().size(), Priority::kBulk, {}, nullptr, {},
                          result.Callback());
      EXPECT_TRUE(result.Wait().ok());
    }
    EXPECT_TRUE(ReadBlob(*attached).value() == content_);
    std::filesystem::remove(path);
  }
}

TEST_F(SeveralOriginsTest, WrongBytesInALargeRequestComeFromTheOther) {
  PutWrongFrames();
  const auto store = OpenStore();
  const auto attached = Attach(*store, NewBadOrigin());
  Attach(*store, NewOrigin());
  FetchResult result;
  attached->FetchBulk(0, attached->frames().size(), Priority::kBulk, {}, nullptr, {},
                      result.Callback());
  const absl::Status status = result.Wait();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(attached->present_frames(), attached->frames().size());
  EXPECT_TRUE(ReadBlob(*attached).value() == content_);
}

TEST_F(SeveralOriginsTest, ALargeRequestGoesOnWhereAnOriginBreaksOff) {
  const auto bad = NewBadOrigin();
  PutIntoBad(blob_.info.digest, blob_.object);
  const auto store = OpenStore();
  const auto good = NewOrigin();
  const auto attached = Attach(*store, bad);
  Attach(*store, good);
  good->ForgetRanges();
  bad->HoldStreamsAfter(1 << 20);
  FetchResult result;
  attached->FetchBulk(0, attached->frames().size(), Priority::kBulk, {}, nullptr, {},
                      result.Callback());
  bad->AwaitHeld(1);
  bad->FailWith(absl::UnavailableError("gone"));
  bad->Release();
  const absl::Status status = result.Wait();
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_EQ(good->ranges().size(), 1u);
  EXPECT_GE(good->ranges()[0].first, (1u << 20) - 100'000);
  EXPECT_TRUE(ReadBlob(*attached).value() == content_);
}

TEST_F(SeveralOriginsTest, TheErrorNamesAllThatWereAsked) {
  const auto good = NewOrigin();
  const auto store = OpenStore();
  const auto attached = Attach(*store, good);
  Attach(*store, NewBadOrigin());
  good->FailWith(absl::UnavailableError("gone"));
  const absl::Status status = ReadBlob(*attached).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/layout: gone; origin observed oci:"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("/bad: "));
  good->FailWith(absl::OkStatus());
  EXPECT_TRUE(ReadBlob(*attached).value() == content_);
}

TEST_F(SeveralOriginsTest, ANewerOriginTakesThePlaceOfOneWithTheSameName) {
  const auto store = OpenStore();
  const auto first = NewOrigin();
  const auto second = NewOrigin();
  const auto attached = Attach(*store, first);
  first->FailWith(absl::UnavailableError("gone"));
  EXPECT_FALSE(ReadBlob(*attached).ok());
  Attach(*store, second);
  first->ForgetRanges();
  EXPECT_TRUE(ReadBlob(*attached).ok());
  EXPECT_TRUE(first->ranges().empty());
}

}  // namespace
}  // namespace lamina::chunkstore
