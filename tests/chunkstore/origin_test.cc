// SPDX-License-Identifier: Apache-2.0
//
// What every origin must do. A new kind of origin joins by adding a line to INSTANTIATE below.
#include "chunkstore/origin.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "chunkstore/base/file.h"
#include "chunkstore/oci_layout_origin.h"
#include "chunkstore/registry/registry_origin.h"
#include "tests/chunkstore/blob_testing.h"
#include "tests/registry/registry_server.h"

namespace lamina::chunkstore {
namespace {

using testing::HasSubstr;

// A place that holds objects, and a way to open it as an origin.
class OriginHost {
 public:
  virtual ~OriginHost() = default;
  virtual absl::StatusOr<std::unique_ptr<Origin>> Open() = 0;
  // Objects may hold anything: an origin does not check digests.
  virtual void Put(const Digest& digest, const std::string& content) = 0;
  virtual void Truncate(const Digest& digest, uint64_t size) = 0;
  virtual void Remove(const Digest& digest) = 0;
};

class LayoutHost : public OriginHost {
 public:
  explicit LayoutHost(ReadMethod method) : method_(method) {
    auto directory = TemporaryDirectory::Create(testing::TempDir(), "lamina-origin-");
    EXPECT_TRUE(directory.ok()) << directory.status();
    directory_ = std::make_unique<TemporaryDirectory>(std::move(*directory));
    std::filesystem::create_directories(directory_->path() + "/blobs/sha256");
  }

  absl::StatusOr<std::unique_ptr<Origin>> Open() override {
    return OpenOciLayoutOrigin(directory_->path(), method_);
  }
  void Put(const Digest& digest, const std::string& content) override {
    std::ofstream(Path(digest), std::ios::binary) << content;
  }
  void Truncate(const Digest& digest, uint64_t size) override {
    std::filesystem::resize_file(Path(digest), size);
  }
  void Remove(const Digest& digest) override { std::filesystem::remove(Path(digest)); }

  std::string Path(const Digest& digest) const {
    return directory_->path() + "/blobs/sha256/" + digest.Hex();
  }

 private:
  const ReadMethod method_;
  std::unique_ptr<TemporaryDirectory> directory_;
};

class RegistryHost : public OriginHost {
 public:
  absl::StatusOr<std::unique_ptr<Origin>> Open() override {
    ASSIGN_OR_RETURN(std::shared_ptr<http::Client> client, http::Client::Create());
    return registry::MakeRegistryOrigin(std::make_shared<registry::Repository>(
        std::move(client), registry::Settings{.plain_http = true}, server_->host(), "test"));
  }
  void Put(const Digest& digest, const std::string& content) override {
    server_->Put(digest, content);
  }
  void Truncate(const Digest& digest, uint64_t size) override { server_->Truncate(digest, size); }
  void Remove(const Digest& digest) override { server_->Remove(digest); }

 private:
  const std::unique_ptr<registry::RegistryServer> server_ = registry::RegistryServer::Start();
};

struct OriginKind {
  const char* name;
  std::function<std::unique_ptr<OriginHost>()> make;
};

class OriginConformanceTest : public testing::TestWithParam<OriginKind> {
 protected:
  OriginConformanceTest() : host_(GetParam().make()) {
    auto origin = host_->Open();
    EXPECT_TRUE(origin.ok()) << origin.status();
    origin_ = std::move(*origin);
    host_->Put(digest_, content_);
  }

  std::unique_ptr<OriginObject> OpenObject() {
    auto object = origin_->Open(digest_, content_.size());
    EXPECT_TRUE(object.ok()) << object.status();
    return std::move(*object);
  }

  absl::StatusOr<std::string> Read(OriginObject& object, uint64_t offset, uint64_t length) {
    std::string into(length, '\0');
    const RangeRead range{offset, std::as_writable_bytes(std::span(into))};
    RETURN_IF_ERROR(object.Read(std::span(&range, 1)));
    return into;
  }

  absl::Status OpenAndRead(const Digest& digest, uint64_t size) {
    ASSIGN_OR_RETURN(const std::unique_ptr<OriginObject> object, origin_->Open(digest, size));
    return Read(*object, 0, size).status();
  }

  const Digest digest_ = Digest::Of(AsBytes("an object"));
  const std::string content_ = RandomBytes(3'000'001, 7);
  std::unique_ptr<OriginHost> host_;
  std::unique_ptr<Origin> origin_;
};

TEST_P(OriginConformanceTest, ReadsRangesAnywhere) {
  const auto object = OpenObject();
  const uint64_t size = content_.size();
  for (const auto& [offset, length] :
       std::initializer_list<std::pair<uint64_t, uint64_t>>{{0, 1},
                                                            {0, 4096},
                                                            {4095, 2},
                                                            {size - 1, 1},
                                                            {size - 4096, 4096},
                                                            {1, size - 1},
                                                            {0, size},
                                                            {123'457, 1'000'003}}) {
    const auto read = Read(*object, offset, length);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(*read == content_.substr(offset, length)) << offset << " " << length;
  }
}

TEST_P(OriginConformanceTest, ReadsManyRangesAtOnce) {
  const auto object = OpenObject();
  std::mt19937_64 random(1);
  std::vector<uint64_t> offsets;
  std::vector<std::string> into;
  for (int i = 0; i < 300; ++i) {
    offsets.push_back(random() % content_.size());
    into.emplace_back(random() % std::min<uint64_t>(20'000, content_.size() - offsets.back()),
                      '\0');
  }
  std::vector<RangeRead> ranges;
  for (size_t i = 0; i < into.size(); ++i) {
    ranges.push_back({offsets[i], std::as_writable_bytes(std::span(into[i]))});
  }
  const absl::Status status = object->Read(ranges);
  ASSERT_TRUE(status.ok()) << status;
  for (size_t i = 0; i < into.size(); ++i) {
    EXPECT_TRUE(into[i] == content_.substr(offsets[i], into[i].size())) << i;
  }
}

TEST_P(OriginConformanceTest, StreamsGiveEachByteOnceAndInOrder) {
  const auto object = OpenObject();
  std::vector<std::byte> buffer(100'000);
  const uint64_t size = content_.size();
  for (const auto& [offset, length] : std::initializer_list<std::pair<uint64_t, uint64_t>>{
           {0, size}, {0, 0}, {size, 0}, {size - 1, 1}, {123'457, 2'000'003}}) {
    std::string content;
    const absl::Status status =
        object->Stream(offset, length, buffer, [&](std::span<const std::byte> piece) {
          content.append(AsText(piece));
          return absl::OkStatus();
        });
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(content == content_.substr(offset, length)) << offset << " " << length;
  }
}

TEST_P(OriginConformanceTest, AStreamWaitsForItsSink) {
  const Digest digest = Digest::Of(AsBytes("a large object"));
  const std::string content = RandomBytes(20 << 20, 8);
  host_->Put(digest, content);
  const auto object = origin_->Open(digest, content.size());
  ASSERT_TRUE(object.ok()) << object.status();
  std::vector<std::byte> buffer(100'000);
  uint64_t position = 0;
  const absl::Status status =
      (*object)->Stream(0, content.size(), buffer, [&](std::span<const std::byte> piece) {
        EXPECT_TRUE(AsText(piece) == std::string_view(content).substr(position, piece.size()));
        position += piece.size();
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(position, content.size());
}

TEST_P(OriginConformanceTest, AStreamEndsWithTheErrorOfItsSink) {
  const auto object = OpenObject();
  std::vector<std::byte> buffer(100'000);
  int calls = 0;
  const absl::Status status =
      object->Stream(0, content_.size(), buffer, [&](std::span<const std::byte>) {
        ++calls;
        return absl::AbortedError("enough");
      });
  EXPECT_EQ(status, absl::AbortedError("enough"));
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(Read(*object, 0, content_.size()).value() == content_);
}

TEST_P(OriginConformanceTest, StreamsPastTheEndAreDataLoss) {
  const auto object = OpenObject();
  std::vector<std::byte> buffer(100'000);
  const auto ignore = [](std::span<const std::byte>) { return absl::OkStatus(); };
  const uint64_t size = content_.size();
  EXPECT_EQ(object->Stream(size - 5, 6, buffer, ignore).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(object->Stream(UINT64_MAX, 6, buffer, ignore).code(), absl::StatusCode::kDataLoss);
  host_->Truncate(digest_, 100'000);
  EXPECT_EQ(object->Stream(99'990, 20, buffer, ignore).code(), absl::StatusCode::kDataLoss);
}

TEST_P(OriginConformanceTest, NothingToReadIsNoError) {
  const auto object = OpenObject();
  EXPECT_TRUE(object->Read({}).ok());
  EXPECT_TRUE(Read(*object, 5, 0).ok());
  EXPECT_TRUE(Read(*object, content_.size(), 0).ok());
}

TEST_P(OriginConformanceTest, ReadsAnEmptyObject) {
  const Digest digest = Digest::Of({});
  host_->Put(digest, "");
  const auto object = origin_->Open(digest, 0);
  ASSERT_TRUE(object.ok()) << object.status();
  EXPECT_TRUE(Read(**object, 0, 0).ok());
  EXPECT_EQ(Read(**object, 0, 1).status().code(), absl::StatusCode::kDataLoss);
}

TEST_P(OriginConformanceTest, RangesPastTheEndAreDataLoss) {
  const auto object = OpenObject();
  const uint64_t size = content_.size();
  for (const auto& [offset, length] : std::initializer_list<std::pair<uint64_t, uint64_t>>{
           {size, 1}, {size - 1, 2}, {size + 1, 0}, {UINT64_MAX, 1}, {UINT64_MAX - 1, 100}}) {
    EXPECT_EQ(Read(*object, offset, length).status().code(), absl::StatusCode::kDataLoss)
        << offset << " " << length;
  }
  EXPECT_TRUE(Read(*object, 0, size).ok());
}

TEST_P(OriginConformanceTest, OneBadRangeFailsAll) {
  const auto object = OpenObject();
  std::string good(10, '\0');
  std::string bad(10, '\0');
  const RangeRead ranges[] = {{0, std::as_writable_bytes(std::span(good))},
                              {content_.size() - 5, std::as_writable_bytes(std::span(bad))}};
  EXPECT_EQ(object->Read(ranges).code(), absl::StatusCode::kDataLoss);
}

TEST_P(OriginConformanceTest, MissingObjectIsNotFound) {
  const Digest other = Digest::Of(AsBytes("another object"));
  EXPECT_EQ(OpenAndRead(other, 5).code(), absl::StatusCode::kNotFound);
}

TEST_P(OriginConformanceTest, ObjectOfAnotherSizeIsDataLoss) {
  EXPECT_EQ(OpenAndRead(digest_, content_.size() + 1).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(OpenAndRead(digest_, content_.size() - 1).code(), absl::StatusCode::kDataLoss);
}

TEST_P(OriginConformanceTest, ObjectTruncatedAfterOpenIsDataLoss) {
  const auto object = OpenObject();
  host_->Truncate(digest_, 100'000);
  EXPECT_EQ(Read(*object, 99'990, 20).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Read(*object, 200'000, 20).status().code(), absl::StatusCode::kDataLoss);
  // What is still there may be refused too, as a part of another object.
  const auto before = Read(*object, 0, 100'000);
  EXPECT_TRUE(before.ok() ? *before == content_.substr(0, 100'000)
                          : absl::IsDataLoss(before.status()))
      << before.status();
}

TEST_P(OriginConformanceTest, ManyThreadsReadAtOnce) {
  const auto object = OpenObject();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 12; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(i);
      for (int k = 0; k < 50; ++k) {
        const uint64_t offset = random() % (content_.size() - 50'000);
        const auto read = Read(*object, offset, 50'000);
        if (!read.ok() || *read != content_.substr(offset, 50'000)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(OriginConformanceTest, ObjectsOutliveTheOrigin) {
  const auto object = OpenObject();
  origin_.reset();
  EXPECT_EQ(Read(*object, 0, 10).value(), content_.substr(0, 10));
}

INSTANTIATE_TEST_SUITE_P(
    All, OriginConformanceTest,
    testing::Values(OriginKind{"LayoutWithIoUring",
                               [] { return std::make_unique<LayoutHost>(ReadMethod::kIoUring); }},
                    OriginKind{"LayoutWithPread",
                               [] { return std::make_unique<LayoutHost>(ReadMethod::kPread); }},
                    OriginKind{"Registry", [] { return std::make_unique<RegistryHost>(); }}),
    [](const testing::TestParamInfo<OriginKind>& info) { return info.param.name; });

class OciLayoutOriginTest : public testing::Test {
 protected:
  absl::Status OpenObject() {
    const auto origin = host_.Open();
    if (!origin.ok()) return origin.status();
    return (*origin)->Open(digest_, 5).status();
  }

  const Digest digest_ = Digest::Of(AsBytes("an object"));
  LayoutHost host_{ReadMethod::kAuto};
};

TEST_F(OciLayoutOriginTest, NamesTheDirectory) {
  const auto origin = host_.Open();
  ASSERT_TRUE(origin.ok());
  EXPECT_THAT((*origin)->name(), testing::StartsWith("oci:/"));
}

TEST_F(OciLayoutOriginTest, MissingLayoutIsNotFound) {
  const auto origin = OpenOciLayoutOrigin("/nonexistent/layout");
  EXPECT_EQ(origin.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(origin.status().message()), HasSubstr("/nonexistent/layout"));
}

TEST_F(OciLayoutOriginTest, RefusesWhatIsNotARegularFileWithoutBlocking) {
  ASSERT_EQ(::mkfifo(host_.Path(digest_).c_str(), 0600), 0);
  EXPECT_EQ(OpenObject().code(), absl::StatusCode::kInvalidArgument);
  std::filesystem::remove(host_.Path(digest_));
  std::filesystem::create_directory(host_.Path(digest_));
  EXPECT_EQ(OpenObject().code(), absl::StatusCode::kInvalidArgument);
  std::filesystem::remove(host_.Path(digest_));
  std::filesystem::create_symlink("/dev/zero", host_.Path(digest_));
  EXPECT_EQ(OpenObject().code(), absl::StatusCode::kInvalidArgument);
  std::filesystem::remove(host_.Path(digest_));
  std::filesystem::create_symlink("/nonexistent", host_.Path(digest_));
  EXPECT_EQ(OpenObject().code(), absl::StatusCode::kNotFound);
}

TEST_F(OciLayoutOriginTest, FollowsLinksToObjects) {
  std::ofstream(host_.Path(digest_) + ".kept elsewhere") << "12345";
  std::filesystem::create_symlink(host_.Path(digest_) + ".kept elsewhere", host_.Path(digest_));
  EXPECT_TRUE(OpenObject().ok());
}

// Makes io_uring_setup fail in this process with EPERM, as container runtimes do.
bool ForbidIoUring() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{.len = std::size(program), .filter = program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST_F(OciLayoutOriginTest, FallsBackToPreadWhereIoUringIsForbidden) {
  host_.Put(digest_, "12345");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (!ForbidIoUring()) ::_exit(10);
    const auto forced = LayoutHost(ReadMethod::kIoUring).Open();
    if (forced.ok() || !absl::IsPermissionDenied(forced.status())) ::_exit(11);
    const auto origin = host_.Open();
    if (!origin.ok()) ::_exit(12);
    const auto object = (*origin)->Open(digest_, 5);
    if (!object.ok()) ::_exit(13);
    std::string into(3, '\0');
    const RangeRead range{1, std::as_writable_bytes(std::span(into))};
    ::_exit((*object)->Read(std::span(&range, 1)).ok() && into == "234" ? 0 : 14);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace lamina::chunkstore
