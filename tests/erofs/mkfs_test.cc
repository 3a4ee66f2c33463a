// SPDX-License-Identifier: Apache-2.0
//
// Images that mkfs.erofs makes, read by us and by the kernel.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <memory>

#include "tests/erofs/erofs_testing.h"

namespace lamina::erofs {
namespace {

// A directory with all kinds of files, made into an image by mkfs.erofs and mounted.
class MkfsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!CanMount()) GTEST_SKIP() << "mounting, and making device nodes, need root";
    source_ = scratch_.path() + "/source";
    mount_point_ = scratch_.path() + "/mnt";
    ASSERT_EQ(mkdir(source_.c_str(), 0755), 0);
    ASSERT_EQ(mkdir(mount_point_.c_str(), 0755), 0);
    ASSERT_NO_FATAL_FAILURE(FillSource());
  }

  void FillSource() {
    for (const uint64_t size : {0, 1, 100, 4095, 4096, 4097, 8000, 300'000}) {
      std::string content;
      for (uint64_t i = 0; content.size() < size; ++i) content += fmt::format("{} ", i * i);
      content.resize(size);
      ASSERT_TRUE(WriteFile(fmt::format("{}/{}", source_, size), content).ok());
    }
    const std::string sub = source_ + "/dir";
    ASSERT_EQ(mkdir(sub.c_str(), 01777), 0);
    for (int i = 0; i < 500; ++i) {
      ASSERT_TRUE(WriteFile(fmt::format("{}/file \xff {}", sub, i), "x").ok());
    }
    ASSERT_EQ(link((source_ + "/100").c_str(), (sub + "/hard link").c_str()), 0);
    ASSERT_EQ(symlink("target", (sub + "/short").c_str()), 0);
    ASSERT_EQ(symlink(std::string(4000, 't').c_str(), (sub + "/long").c_str()), 0);
    ASSERT_EQ(mknod((sub + "/char").c_str(), S_IFCHR | 0600, makedev(300, 70'000)), 0);
    ASSERT_EQ(mknod((sub + "/block").c_str(), S_IFBLK | 0600, makedev(8, 1)), 0);
    ASSERT_EQ(mkfifo((sub + "/fifo").c_str(), 0640), 0);
    ASSERT_EQ(mknod((sub + "/socket").c_str(), S_IFSOCK | 0755, 0), 0);
    ASSERT_EQ(chown((source_ + "/4097").c_str(), 100'000, 4'000'000'000), 0);
    const auto set = [&](const std::string& path, const char* name, const std::string& value) {
      ASSERT_EQ(lsetxattr(path.c_str(), name, value.data(), value.size(), 0), 0) << path << name;
    };
    for (const char* file : {"/1", "/100", "/4095", "/4096", "/dir"}) {
      set(source_ + file, "trusted.common", "shared by some");
      set(source_ + file, "security.common", std::string(300, 's'));
    }
    set(source_ + "/8000", "trusted.own", std::string(2000, 'o'));
    set(source_ + "/8000", "trusted.empty", "");
  }

  // Makes and mounts an image, and opens it with our reader.
  void MakeImage(const std::string& options, const std::string& device = "") {
    const std::string image = scratch_.path() + "/image";
    const CommandResult mkfs =
        RunCommand(fmt::format("mkfs.erofs {} {} {}", options, image, source_));
    ASSERT_TRUE(mkfs.ok) << mkfs.output;
    std::vector<std::string> devices;
    if (!device.empty()) devices.push_back(device);
    absl::StatusOr<KernelMount> mount = KernelMount::Create(image, devices, mount_point_);
    ASSERT_TRUE(mount.ok()) << mount.status();
    mount_ = std::make_unique<KernelMount>(*std::move(mount));
    bytes_ = *ReadFileToString(image, 1 << 30);
    absl::StatusOr<Reader> reader = Reader::Open(AsBytes(bytes_));
    ASSERT_TRUE(reader.ok()) << reader.status();
    reader_ = std::make_unique<Reader>(*std::move(reader));
  }

  InodeInfo Find(std::string_view name) {
    const InodeInfo root = reader_->ReadInode(reader_->root()).value();
    return reader_->ReadInode(reader_->Lookup(root, name).value()).value();
  }

  // Reads a file through Map; `device` is the content of device 1.
  std::string ReadContent(const InodeInfo& file, std::string_view device) {
    std::string content;
    while (content.size() < file.size) {
      const Mapped mapped = reader_->Map(file, content.size()).value();
      if (mapped.kind == Mapped::Kind::kHole) {
        content.append(mapped.length, '\0');
      } else if (mapped.device == 0) {
        content += AsText(reader_->ImageBytes(mapped.offset, mapped.length).value());
      } else {
        content += device.substr(mapped.offset, mapped.length);
      }
    }
    return content;
  }

  void CheckContent(std::string_view device = {}) {
    for (const char* name : {"0", "1", "100", "4095", "4096", "4097", "8000", "300000"}) {
      const std::string expected = *ReadFileToString(source_ + "/" + name, 1 << 30);
      EXPECT_TRUE(ReadContent(Find(name), device) == expected) << name;
    }
  }

  TemporaryDirectory scratch_ = MakeScratch();
  std::string source_;
  std::string mount_point_;
  std::unique_ptr<KernelMount> mount_;
  std::string bytes_;
  std::unique_ptr<Reader> reader_;
};

TEST_F(MkfsTest, ReadsPlainImages) {
  ASSERT_NO_FATAL_FAILURE(MakeImage(""));
  EXPECT_EQ(DescribeImage(*reader_), DescribeDirectory(mount_->path()));
  CheckContent();
}

TEST_F(MkfsTest, ReadsImagesWithOneTimeForAllFiles) {
  ASSERT_NO_FATAL_FAILURE(MakeImage("-T1234567 --all-root"));
  EXPECT_EQ(DescribeImage(*reader_), DescribeDirectory(mount_->path()));
  CheckContent();
}

TEST_F(MkfsTest, ReadsImagesWithOnlyExtendedInodesAndInlineXattrs) {
  ASSERT_NO_FATAL_FAILURE(MakeImage("-Eforce-inode-extended,noinline_data,nosbcrc -x1000"));
  EXPECT_EQ(DescribeImage(*reader_), DescribeDirectory(mount_->path()));
  CheckContent();
}

TEST_F(MkfsTest, ReadsChunksWithAndWithoutIndexes) {
  for (const char* options :
       {"--chunksize=4096", "--chunksize=65536", "-Eforce-chunk-indexes --chunksize=8192"}) {
    SCOPED_TRACE(options);
    ASSERT_NO_FATAL_FAILURE(MakeImage(options));
    EXPECT_EQ(DescribeImage(*reader_), DescribeDirectory(mount_->path()));
    CheckContent();
    mount_.reset();
  }
}

TEST_F(MkfsTest, ReadsChunksOnAnotherDevice) {
  const std::string device = scratch_.path() + "/device";
  ASSERT_NO_FATAL_FAILURE(MakeImage("--chunksize=4096 --blobdev=" + device, device));
  EXPECT_EQ(DescribeImage(*reader_), DescribeDirectory(mount_->path()));
  ASSERT_EQ(reader_->devices().size(), 1u);
  CheckContent(*ReadFileToString(device, 1 << 30));
  EXPECT_EQ(reader_->Map(Find("300000"), 0)->device, 1);
  const absl::StatusOr<Tree> tree = ReadTree(*reader_);
  ASSERT_TRUE(tree.ok()) << tree.status();
  EXPECT_EQ(Describe(*tree), DescribeDirectory(mount_->path()));
}

TEST_F(MkfsTest, ReadsTheMetadataOfCompressedImages) {
  for (const char* options : {"-zlz4hc", "-zlz4hc -Elegacy-compress", "-zlz4hc -Eztailpacking"}) {
    SCOPED_TRACE(options);
    ASSERT_NO_FATAL_FAILURE(MakeImage(options));
    EXPECT_EQ(DescribeImage(*reader_), DescribeDirectory(mount_->path()));
    const absl::Status status = reader_->Map(Find("300000"), 0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(status.message(), testing::HasSubstr("compressed"));
    EXPECT_EQ(ReadTree(*reader_).status().code(), absl::StatusCode::kUnimplemented);
    mount_.reset();
  }
}

}  // namespace
}  // namespace lamina::erofs
